"""The architecture as tests: who may import whom, and what nobody may write."""

import ast
import sys
from pathlib import Path

import pytest

PACKAGE = Path(__file__).parent.parent / "sspjax"
MODULES = sorted(PACKAGE.rglob("*.py"))

LEAVES = ("sspjax.types", "sspjax.config", "sspjax.errors")

LAYERS = {
    "self_play": (*LEAVES, "sspjax.self_play"),
    "learner": (*LEAVES, "sspjax.self_play", "sspjax.learner"),
}
"""What a pure package may import of ours."""

OUTSIDE = {
    "self_play": {"numpy"},
    "learner": {"numpy", "jax", "jaxtyping", "optax", "flax", "chex", "einops"},
}
"""And of others'."""

WORLD = {
    "asyncio",
    "concurrent",
    "datetime",
    "http",
    "io",
    "multiprocessing",
    "os",
    "pathlib",
    "secrets",
    "shutil",
    "socket",
    "subprocess",
    "tempfile",
    "threading",
    "time",
    "urllib",
    "uuid",
}
"""Parts of the standard library through which a pure package would meet clock, disk or network."""


def tree(path):
    return ast.parse(path.read_text(encoding="utf-8"), filename=str(path))


def imports(path):
    """Every imported module with its line; `from a import b` counts as a and a.b."""
    for node in ast.walk(tree(path)):
        if isinstance(node, ast.Import):
            for name in node.names:
                yield node.lineno, name.name
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}:{node.lineno}: relative import"
            yield node.lineno, node.module
            for name in node.names:
                yield node.lineno, f"{node.module}.{name.name}"


def within(module, packages):
    return any(module == p or module.startswith(f"{p}.") for p in packages)


def pure(path):
    package = path.relative_to(PACKAGE).parts[0]
    return package if package in LAYERS else None


PURE = [path for path in MODULES if pure(path)]


def label(path):
    return str(path.relative_to(PACKAGE))


@pytest.mark.parametrize("path", PURE, ids=label)
def test_the_pure_core_imports_no_world(path):
    allowed, outside = LAYERS[pure(path)], OUTSIDE[pure(path)]
    for line, module in imports(path):
        root = module.split(".")[0]
        if root == "sspjax":
            ours = module == "sspjax" or within(module, allowed)
            assert ours, f"{label(path)}:{line}: {module} is not below {pure(path)}"
        else:
            known = root in outside or (root in sys.stdlib_module_names and root not in WORLD)
            assert known, f"{label(path)}:{line}: {module} reaches outside"


@pytest.mark.parametrize("path", PURE, ids=label)
def test_the_pure_core_has_no_randomness_or_files_of_its_own(path):
    for node in ast.walk(tree(path)):
        if isinstance(node, ast.Attribute) and ast.unparse(node.value) == "random":
            assert node.attr == "Random", f"{label(path)}:{node.lineno}: global random"
        if isinstance(node, ast.Attribute) and ast.unparse(node.value) in (
            "np.random",
            "numpy.random",
        ):
            seeded = node.attr in ("Generator", "default_rng")
            assert seeded, f"{label(path)}:{node.lineno}: global np.random"
        if isinstance(node, ast.Call):
            called = ast.unparse(node.func)
            assert called != "open", f"{label(path)}:{node.lineno}: opens a file"
            unseeded = called in ("random.Random", "np.random.default_rng") and not node.args
            assert not unseeded, f"{label(path)}:{node.lineno}: {called}() without a seed"


def test_only_metrics_asks_the_oracle():
    for path in MODULES:
        for line, module in imports(path):
            asks = within(module, ["sspjax.data.oracle"])
            allowed = label(path) in ("metrics.py", "data/oracle.py")
            assert not asks or allowed, f"{label(path)}:{line}: the oracle is for metrics only"


@pytest.mark.parametrize("path", MODULES, ids=label)
def test_nothing_is_looked_up_by_surprise(path):
    for node in ast.walk(tree(path)):
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name):
            name = node.func.id
            banned = name in ("getattr", "hasattr", "setattr", "print")
            assert not banned, f"{label(path)}:{node.lineno}: {name}"
        if isinstance(node, ast.ExceptHandler):
            caught = [] if node.type is None else ast.unparse(node.type).strip("()").split(", ")
            broad = not caught or {"Exception", "BaseException"} & set(caught)
            assert not broad, f"{label(path)}:{node.lineno}: broad except"


def test_the_rules_themselves_can_fail(tmp_path):
    bad = tmp_path / "bad.py"
    bad.write_text("import time\nfrom sspjax import rollout\nfrom sspjax.data import oracle\n")
    found = [module for _, module in imports(bad)]
    assert {"time", "sspjax.rollout", "sspjax.data.oracle"} <= set(found)
    assert not within("sspjax.rollout", LAYERS["self_play"])
    assert not within("sspjax.types_of_ours", LAYERS["self_play"])
