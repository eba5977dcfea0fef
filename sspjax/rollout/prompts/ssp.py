"""Prompts for language models that follow instructions: SSP's three roles in our own words.

Content after arXiv 2510.18821 (appendix) and its code: the proposer works backwards from the answer
through a chain of searches; the solver is told what Search-R1 tells its policy; the reader answers
from given passages after at most fifty words of thought. The reader answers in the solver's answer
tags, since here it is the solver's policy that reads.
"""

from __future__ import annotations

from sspjax.rollout.prompts.prompt_set import PromptSet
from sspjax.types import Message

_PROPOSER_SYSTEM = """\
You write questions for people who answer them with a search engine. You are given an answer and a \
number of searches. Your question must have exactly this answer, and finding it must take this \
many searches, each of which needs the result of the one before.

Build the question backwards, from the answer to its opening clue:
1. Think of something that is connected with the answer, and search for the connection between the \
two. Do not search for the answer alone.
2. Choose from the results a fact that can be checked and that leads to the answer without doubt. \
What this fact starts from is your new target.
3. Search for a fact that leads to the new target in the same way, and go on like this until the \
chain has as many links as searches were asked for.
4. The last thing you found is the opening clue. Write one question that names only this clue and \
asks for the answer through the whole chain.

Think between <think> and </think> each time you have received new information. To search, write \
<search> your query </search>; the results follow between <information> and </information>. When \
the chain is complete, write <question> your question </question>.

Three questions of the kind that is wanted:
- In which village was the composer born whose opera was the first to be performed at the opera \
house that opened in Cairo in 1869?
- Which river flows through the birthplace of the writer whose character wakes up one morning as \
an insect?
- Who was head of government of the country that hosted the first football world championship in \
the year in which it was held?

Rules:
- Use only facts from the results, nothing that you merely believe.
- The question must not contain the answer, a part of it, or another name for it.
- It must not be solvable without searching.
- It must need as many searches as were asked for, not fewer.
- Exactly one answer may be right, and it must not change with time or opinion."""

_PROPOSER_USER = """\
The answer: {answer}
The number of searches: {hops}

Before you write the question, check it: could somebody answer it from memory, or with fewer \
searches? Then it is too easy; extend or change the chain. End like this example:
<question> At which academy did the architect of the tallest church in Iceland study? </question>"""

_SYSTEM = "You are a careful assistant who gives correct and short answers."

_SOLVER_USER = """\
Answer the question below. Think between <think> and </think> first, and again each time you have \
received new information. When you find that you lack knowledge, call the search engine with \
<search> your query </search>; the best results follow between <information> and </information>. \
You can search as often as you like. As soon as you know enough, give the answer between <answer> \
and </answer>, without any explanation. For example: <answer> Lisbon </answer>

{skills}Question: {question}"""

_READER_USER = """\
Answer the question below from these passages alone. Some of them have nothing to do with it.

{documents}

Think in at most 50 words, then give the answer between <answer> and </answer>, without any \
explanation. For example: <answer> Lisbon </answer>

Question: {question}"""

SSP = PromptSet(
    name="ssp",
    layouts=("chatml", "llama3", "plain"),
    one_line=False,
    proposer=(
        Message(author="system", content=_PROPOSER_SYSTEM),
        Message(author="user", content=_PROPOSER_USER),
    ),
    solver=(
        Message(author="system", content=_SYSTEM),
        Message(author="user", content=_SOLVER_USER),
    ),
    reader=(
        Message(author="system", content=_SYSTEM),
        Message(author="user", content=_READER_USER),
    ),
    skills="What earlier questions have taught:\n{skills}\n",
    skill="- {skill}\n",
    heading="Doc {rank} (Title: {title})\n",
    passage="{text}",
    separator="\n\n",
    nothing="No passage was found.",
    opening="\n<information>\n",
    closing="</information>\n\n",
    act="<{tag}> {argument} </{tag}>",
)
