"""Prompts, tool turns, and the wall against text that speaks with our tags."""

import dataclasses
import unicodedata

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from vocabularies import NAMES, trained, vocabulary

from sspjax.rollout.acts import parse_act
from sspjax.rollout.prompts import (
    PROMPTS,
    PromptTooLong,
    act_text,
    neutralise,
    observation_turn,
    proposer_prompt,
    reader_prompt,
    smallest_observation,
    solver_prompt,
)
from sspjax.rollout.stop import STOP_TAGS
from sspjax.types import Act, Document, Question, Role, Seed

SSP, TINY = PROMPTS["ssp"], PROMPTS["tiny"]
TAG_NAMES = ("think", "information", *(act.value for act in STOP_TAGS))
TAGS = [f"<{slash}{name}>" for name in TAG_NAMES for slash in ("", "/")]
LONG = 100_000

SEED = Seed(uid="s0", answer="Tormoor", hops=2)
QUESTION = Question(uid="q0", text="where was Bravik Tolen born ?", answer="Tormoor")
BRAVIK = Document(id="1", title="Bravik Tolen", text="Bravik Tolen is a writer .")
TORMOOR = Document(id="2", title="Tormoor", text="Tormoor is a city .")


def observe(prompt_set, tokenizer, documents, budget=LONG, document_tokens=LONG):
    return observation_turn(
        prompt_set, tokenizer, documents, budget=budget, document_tokens=document_tokens
    )


# Texts and layouts --------------------------------------------------------------------------------


def test_tiny_prompts_letter_by_letter():
    tokenizer = trained()
    made = [
        proposer_prompt(TINY, tokenizer, SEED, "g", LONG),
        solver_prompt(TINY, tokenizer, QUESTION, "g", LONG),
        solver_prompt(TINY, tokenizer, QUESTION, "g", LONG, skills=("search the name", "b")),
        reader_prompt(TINY, tokenizer, QUESTION, [BRAVIK, TORMOOR], "g", LONG),
        reader_prompt(TINY, tokenizer, QUESTION, [], "g", LONG),
    ]
    ask = " question : where was Bravik Tolen born ?\n"
    assert [tokenizer.decode(p.token_ids) for p in made] == [
        " ask 2 : Tormoor\n",
        ask,
        " note : search the name\n note : b\n" + ask,
        ask + "<information> Bravik Tolen is a writer .\n Tormoor is a city .\n</information>\n",
        ask + "<information> nothing\n</information>\n",
    ]
    assert [p.role for p in made] == [Role.PROPOSER, Role.SOLVER, Role.SOLVER, *[Role.READER] * 2]
    assert made[0].subject is SEED and made[1].subject is QUESTION and made[1].group == "g"
    assert made[0].token_ids.dtype == np.int32
    assert "".join(m.content for m in made[3].messages) == tokenizer.decode(made[3].token_ids)


def test_tiny_names_are_the_same_tokens_everywhere():
    tokenizer = trained()
    name = tokenizer.encode(" Bravik Tolen")
    texts = [
        proposer_prompt(
            TINY, tokenizer, Seed(uid="s", answer="Bravik  Tolen"), "g", LONG
        ).token_ids.tolist(),
        solver_prompt(TINY, tokenizer, QUESTION, "g", LONG).token_ids.tolist(),
        observe(TINY, tokenizer, [BRAVIK]).token_ids.tolist(),
        tokenizer.encode(act_text(TINY, Act.SEARCH, "Bravik Tolen")),
    ]
    for ids in texts:
        assert any(ids[i : i + len(name)] == name for i in range(len(ids)))


def test_ssp_in_the_chat_layout_has_no_end_tokens_between_messages():
    tokenizer = vocabulary("qwen")
    prompt = solver_prompt(SSP, tokenizer, QUESTION, "g", LONG)
    system, user = prompt.messages
    start = tokenizer.special("<|im_start|>")
    expected = [
        *[start, *tokenizer.encode("system\n"), *tokenizer.encode(system.content)],
        *[start, *tokenizer.encode("user\n"), *tokenizer.encode(user.content)],
        *[start, *tokenizer.encode("assistant\n")],
    ]
    assert prompt.token_ids.tolist() == expected
    assert (system.author, user.author) == ("system", "user")
    assert user.content.endswith("Question: where was Bravik Tolen born ?")


def test_ssp_in_llamas_layout():
    tokenizer = vocabulary("llama3")
    begin, _, header, end_header, _ = range(5)
    ids = solver_prompt(SSP, tokenizer, QUESTION, "g", LONG).token_ids.tolist()
    assert ids[:2] == [begin, header]
    assert ids[2:].index(end_header) == len(tokenizer.encode("system"))
    assert ids[-len(tokenizer.encode("\n\n")) - 1] == end_header
    assert [i for i in ids if i in tokenizer.special_ids] == [begin, *[header, end_header] * 3]


def test_ssp_without_control_tokens_is_plain_text():
    tokenizer = vocabulary("gpt2")
    prompt = solver_prompt(SSP, tokenizer, QUESTION, "g", LONG)
    assert tokenizer.special_ids.isdisjoint(prompt.token_ids.tolist())
    system, user = prompt.messages
    assert tokenizer.decode(prompt.token_ids) == f"{system.content}\n\n{user.content}\n\n"


def test_ssp_texts_tell_each_role_its_tags():
    tokenizer = vocabulary("qwen")
    texts = {
        p.role: "".join(m.content for m in p.messages)
        for p in (
            proposer_prompt(SSP, tokenizer, SEED, "g", LONG),
            solver_prompt(SSP, tokenizer, QUESTION, "g", LONG),
            reader_prompt(SSP, tokenizer, QUESTION, [BRAVIK], "g", LONG),
        )
    }
    for role, tags in (
        (Role.PROPOSER, ("think", "search", "information", "question")),
        (Role.SOLVER, ("think", "search", "information", "answer")),
        (Role.READER, ("answer",)),
    ):
        assert all(f"<{tag}>" in texts[role] and f"</{tag}>" in texts[role] for tag in tags)
    assert "<search>" not in texts[Role.READER]
    assert "The answer: Tormoor" in texts[Role.PROPOSER] and "searches: 2" in texts[Role.PROPOSER]
    assert "Doc 1 (Title: Bravik Tolen)\nBravik Tolen is a writer .\n" in texts[Role.READER]
    assert not any("{" in text for text in texts.values())


def test_without_skills_the_prompt_has_no_trace_of_them():
    tokenizer = vocabulary("qwen")
    plain = solver_prompt(SSP, tokenizer, QUESTION, "g", LONG)
    taught = solver_prompt(SSP, tokenizer, QUESTION, "g", LONG, skills=["Search {twice}."])
    block = "What earlier questions have taught:\n- Search {twice}.\n\n"
    assert taught.messages[-1].content.replace(block, "") == plain.messages[-1].content
    assert block in taught.messages[-1].content


@pytest.mark.parametrize("prompt_set", PROMPTS.values(), ids=PROMPTS)
def test_every_set_fills_every_field_of_every_role(prompt_set):
    tokenizer = trained()
    answer = Seed(uid="s", answer="{hops} Xyzzy")
    question = Question(uid="q", text="plugh {skills} ?", answer="a")
    document = Document(id="d", title="Titul", text="frotz {documents}")
    made = {
        "xyzzy": proposer_prompt(prompt_set, tokenizer, answer, "g", LONG),
        "plugh": solver_prompt(prompt_set, tokenizer, question, "g", LONG),
        "frotz": reader_prompt(prompt_set, tokenizer, question, [document], "g", LONG),
    }
    for word, prompt in made.items():
        assert tokenizer.decode(prompt.token_ids).lower().count(word) == 1


def test_acts_are_written_as_they_are_read():
    for prompt_set in PROMPTS.values():
        for act in STOP_TAGS:
            text = act_text(prompt_set, act, " Bravik Tolen ")
            assert text == f"<{act.value}> Bravik Tolen </{act.value}>"
            assert parse_act(text, [act]) == (act, "Bravik Tolen")


# Limits -------------------------------------------------------------------------------------------


def test_a_prompt_over_its_limit_is_refused_by_name():
    tokenizer = trained()
    length = len(solver_prompt(TINY, tokenizer, QUESTION, "g", LONG).token_ids)
    assert solver_prompt(TINY, tokenizer, QUESTION, "g", length) is not None
    with pytest.raises(PromptTooLong, match=rf"q0.*at most {length - 1}.*got {length}.*solver"):
        solver_prompt(TINY, tokenizer, QUESTION, "g", length - 1)
    with pytest.raises(PromptTooLong, match=r"seed s0.*at most 2.*config.proposer.prompt_tokens"):
        proposer_prompt(TINY, tokenizer, SEED, "g", 2)


def test_a_reader_prompt_over_its_limit_is_none():
    tokenizer = trained()
    documents = [BRAVIK, TORMOOR]
    length = len(reader_prompt(SSP, tokenizer, QUESTION, documents, "g", LONG).token_ids)
    fits = reader_prompt(SSP, tokenizer, QUESTION, documents, "g", length)
    assert len(fits.token_ids) == length
    assert reader_prompt(SSP, tokenizer, QUESTION, documents, "g", length - 1) is None


def test_a_seed_without_an_answer_is_refused():
    with pytest.raises(ValueError, match="seed s1: expected an answer.*seeds.kind"):
        proposer_prompt(SSP, trained(), Seed(uid="s1"), "g", LONG)


# Tool turns ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("prompt_set", "documents", "text"),
    [
        (
            SSP,
            [BRAVIK, TORMOOR],
            "\n<information>\nDoc 1 (Title: Bravik Tolen)\nBravik Tolen is a writer .\n\n"
            "Doc 2 (Title: Tormoor)\nTormoor is a city .</information>\n\n",
        ),
        (SSP, [], "\n<information>\nNo passage was found.</information>\n\n"),
        (
            TINY,
            [BRAVIK, TORMOOR],
            "\n<information> Bravik Tolen is a writer .\n Tormoor is a city .\n</information>\n",
        ),
        (TINY, [], "\n<information> nothing\n</information>\n"),
    ],
)
def test_observation_text(prompt_set, documents, text):
    for name in NAMES:
        tokenizer = vocabulary(name)
        turn = observe(prompt_set, tokenizer, documents)
        assert turn.text == text == tokenizer.decode(turn.token_ids)
        assert not turn.sampled and turn.act is Act.NONE and turn.documents == tuple(documents)
        assert turn.token_ids.dtype == np.int32
        assert turn.logprobs.dtype == np.float32 and not turn.logprobs.any()
        assert len(turn.logprobs) == len(turn.token_ids)


def words(title: str, count: int) -> Document:
    return Document(id=title, title=title, text="a " * count)


def test_a_passage_is_cut_to_document_tokens():
    tokenizer = trained()
    turn = observe(TINY, tokenizer, [words("x", 100), words("y", 5)], document_tokens=20)
    assert turn.text == f"\n<information>{' a' * 20}\n{' a' * 5}\n</information>\n"


def test_long_passages_share_what_short_ones_leave():
    """Room for 36 tokens of passages (two separators of the 38): 5 + 15 + 15, one is left over."""
    tokenizer = trained()
    frame = len(tokenizer.encode(TINY.opening)) + len(tokenizer.encode(TINY.closing))
    documents = [words("x", 100), words("y", 5), words("z", 40)]
    turn = observe(TINY, tokenizer, documents, budget=frame + 38)
    passages = "\n".join(" a" * n for n in (15, 5, 15))
    assert turn.text == f"\n<information>{passages}\n</information>\n"
    assert len(turn.token_ids) == frame + 37


def test_the_last_passages_go_when_too_little_would_remain():
    tokenizer = trained()
    frame = len(tokenizer.encode(TINY.opening)) + len(tokenizer.encode(TINY.closing))
    documents = [words("x", 100), words("y", 100), words("z", 3)]
    turn = observe(TINY, tokenizer, documents, budget=frame + 17)
    assert turn.text == f"\n<information>{' a' * 8}\n{' a' * 8}\n</information>\n"
    assert turn.documents == tuple(documents[:2])
    turn = observe(TINY, tokenizer, documents, budget=frame + 7)
    assert turn.text == "\n<information>\n</information>\n" and turn.documents == ()


def test_a_long_title_does_not_crowd_out_its_text():
    tokenizer = trained()
    document = Document(id="1", title="t " * 500, text="a " * 500)
    turn = observe(SSP, tokenizer, [document], document_tokens=60)
    assert turn.documents == (document,) and turn.text.count(" a") >= 25


def test_a_cut_leaves_whole_characters():
    tokenizer = trained()
    document = Document(id="1", title="", text="☃" * 40)
    texts = [observe(TINY, tokenizer, [document], document_tokens=n).text for n in range(10, 30)]
    assert not any("\ufffd" in text for text in texts)
    assert len(set(texts)) > 4


@settings(max_examples=60, deadline=None, database=None)
@given(
    st.lists(st.tuples(st.text(max_size=20), st.text(max_size=200)), max_size=5),
    st.integers(0, 120),
    st.integers(1, 60),
    st.sampled_from(["ssp", "tiny"]),
    st.sampled_from(["trained", "qwen", "sentencepiece"]),
)
def test_the_budget_holds_and_the_closing_tag_is_there(passages, extra, cut, texts, name):
    tokenizer, prompt_set = vocabulary(name), PROMPTS[texts]
    documents = [Document(id=str(i), title=a, text=b) for i, (a, b) in enumerate(passages)]
    budget = smallest_observation(prompt_set, tokenizer) + extra
    turn = observe(prompt_set, tokenizer, documents, budget, cut)
    assert len(turn.token_ids) <= budget
    assert turn.text.startswith(prompt_set.opening) and turn.text.endswith(prompt_set.closing)
    assert turn.documents == tuple(documents[: len(turn.documents)])


def test_a_budget_below_the_tags_is_refused():
    tokenizer = trained()
    floor = smallest_observation(TINY, tokenizer)
    turn = observe(TINY, tokenizer, [], budget=floor)
    assert len(turn.token_ids) == floor
    with pytest.raises(ValueError, match=rf"at least {floor} tokens.*got {floor - 1}"):
        observe(TINY, tokenizer, [], budget=floor - 1)


# The wall against tags ----------------------------------------------------------------------------

INVISIBLE = "\u200b\u200c\u200d\u2060\ufeff\u00ad"


@st.composite
def disguised(draw, names):
    """A tag or control token: any case, blanks or invisible characters inside, other brackets."""
    text = draw(st.sampled_from(names))
    text = draw(st.sampled_from([str, str.upper, str.title]))(text)
    brackets = draw(st.sampled_from(["<>", "\uff1c\uff1e", "\ufe64\ufe65"]))
    text = text.replace("<", brackets[0]).replace(">", brackets[1])
    filler = draw(st.sampled_from(["", " ", "\t", "\n", *INVISIBLE]))
    place = draw(st.integers(0, len(text)))
    return filler.join(text) if draw(st.booleans()) else text[:place] + filler + text[place:]


def unmasked(text: str) -> str:
    """`text` as the most generous reader would take it."""
    text = unicodedata.normalize("NFKC", text).casefold()
    return "".join(c for c in text if not c.isspace() and unicodedata.category(c) != "Cf")


@pytest.mark.parametrize("name", NAMES)
def test_no_passage_speaks_with_our_tags(name):
    tokenizer = vocabulary(name)
    specials = [s.casefold() for s in tokenizer.specials]
    hostile = st.lists(
        st.one_of(disguised([*TAGS, *tokenizer.specials]), st.text(max_size=3)), max_size=6
    ).map("".join)

    @settings(max_examples=60, deadline=None, database=None)
    @given(
        st.lists(st.tuples(hostile, hostile), min_size=1, max_size=3),
        st.sampled_from(list(PROMPTS)),
        st.integers(1, 80),
    )
    def check(passages, texts, cut):
        prompt_set = PROMPTS[texts]
        documents = [Document(id=str(i), title=a, text=b) for i, (a, b) in enumerate(passages)]
        turn = observe(prompt_set, tokenizer, documents, document_tokens=cut)
        inside = unmasked(turn.text[len(prompt_set.opening) : -len(prompt_set.closing)])
        assert not [tag for tag in TAGS if tag in inside]
        assert not [special for special in specials if special in inside and "<" in special]
        assert tokenizer.special_ids.isdisjoint(turn.token_ids.tolist())
        assert turn.text.count("<") == 2

    check()


@pytest.mark.parametrize("tag", [*TAGS, "<|im_start|>", "<|endoftext|>"])
def test_no_question_answer_or_skill_speaks_with_our_tags(tag):
    tokenizer = vocabulary("qwen")
    question = Question(uid="q", text=f"who {tag} was it ?", answer="a")
    seed = Seed(uid="s", answer=f"a {tag} b")
    calm_question = Question(uid="q", text="who was it ?", answer="a")
    for prompt, calm in (
        (
            solver_prompt(SSP, tokenizer, question, "g", LONG, skills=[tag]),
            solver_prompt(SSP, tokenizer, calm_question, "g", LONG, skills=["x"]),
        ),
        (
            proposer_prompt(SSP, tokenizer, seed, "g", LONG),
            proposer_prompt(SSP, tokenizer, Seed(uid="s", answer="a b"), "g", LONG),
        ),
        (
            reader_prompt(SSP, tokenizer, question, [BRAVIK], "g", LONG),
            reader_prompt(SSP, tokenizer, calm_question, [BRAVIK], "g", LONG),
        ),
    ):
        text, calm_text = (tokenizer.decode(p.token_ids) for p in (prompt, calm))
        assert text.count(tag) == calm_text.count(tag)
        specials = [i for i in prompt.token_ids.tolist() if i in tokenizer.special_ids]
        assert specials == [tokenizer.special("<|im_start|>")] * 3


def test_neutralise_changes_brackets_only():
    assert neutralise("a <b> c") == "a \u2039b\u203a c"
    assert neutralise("\uff1c/Search\uff1e \ufe64x\ufe65") == "\u2039/Search\u203a \u2039x\u203a"
    text = "plain text, 東京 « » 〈x〉 & | / =\n"
    assert neutralise(text) == text
    folded = {chr(c) for c in range(0x110000) if unicodedata.normalize("NFKC", chr(c)) in "<>"}
    assert folded - {""} == set("<>\ufe64\ufe65\uff1c\uff1e")
    assert not set(neutralise("".join(sorted(folded)))) & folded


def test_a_vocabulary_without_the_sets_control_tokens_is_refused():
    with pytest.raises(ValueError, match=r"control tokens of one of llama3 .*<\|endoftext\|>"):
        solver_prompt(dataclasses.replace(SSP, layouts=("llama3",)), trained(), QUESTION, "g", LONG)
