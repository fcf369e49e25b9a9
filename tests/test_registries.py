"""No name of a registry stands outside of where it is declared: other code asks what the registry holds and compares none."""

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

from ejdist.experts.schemes import SCHEMES as DISPATCHES
from ejdist.models.parts import PARTS
from ejdist.models.remat import REMAT
from ejdist.order import NAMES as ORDERS
from ejdist.sequence.schemes import SCHEMES

ROOT = Path(__file__).resolve().parent.parent
SOURCES = sorted(p for folder in ("ejdist", "recipes", "launch", "benchmarks") for p in (ROOT / folder).rglob("*.py"))
PLANNER = "ejdist/planning/"

# Registry -> (its names, the file that declares them).
REGISTRIES = {
    "sequence schemes": (set(SCHEMES), "ejdist/sequence/schemes.py"),
    "dispatches of experts": (set(DISPATCHES), "ejdist/experts/schemes.py"),
    "orders": (set(ORDERS), "ejdist/order.py"),
    "parts": ({*PARTS, *(part.name for part in PARTS.values())}, "ejdist/models/parts.py"),
    "remat policies": (set(REMAT), "ejdist/models/remat.py"),
}
# (file, word) -> what the word means there. The keys of a model's section and the rules of checkpoints are declared by part.
KEYS, RULES = "which part a key of the model section is of", "which part a rule of a checkpoint is of"
ELSEWHERE = {
    ("ejdist/planning/step_time.py", "attention"): "a term of the step's time",
    ("launch/__main__.py", "local"): "a command",
    ("benchmarks/comparisons/tpu_precision.py", "mlp"): "three products after a norm",
    ("benchmarks/random_shapes.py", "none"): "no peers",
    ("launch/cluster.py", "local"): "a kind of cluster",
    ("recipes/variant_words.py", "local"): "a variant of a group",
    ("recipes/variant_words.py", "experts"): "a variant of a group",
    ("ejdist/sequence/attention.py", "contiguous"): "the order of tokens that were not permuted",
    ("ejdist/sequence/checks.py", "contiguous"): "the order of tokens that were not permuted",
    ("ejdist/sequence/attention.py", "local"): "an argument of a sharded function",
    ("ejdist/tokens.py", "contiguous"): "the order of tokens that were not permuted",
    ("ejdist/sequence/linear_attention.py", "local"): "an argument of a sharded function",
    ("ejdist/operations.py", "attention"): "the operation that a model calls",
    ("ejdist/generation/served.py", "attention"): "the operation that a model calls",
    ("ejdist/models/recurrent_rwkv7.py", "rwkv7"): "the operation that it calls",
    ("ejdist/models/config.py", "attention"): KEYS,
    ("ejdist/models/config.py", "window_attention"): KEYS,
    ("ejdist/models/config.py", "experts"): KEYS,
    ("ejdist/models/config.py", "latent_attention"): KEYS,
    ("ejdist/models/config.py", "sparse_attention"): KEYS,
    ("ejdist/models/config.py", "gated_delta"): KEYS,
    ("ejdist/models/config.py", "kda"): KEYS,
    ("ejdist/models/config.py", "mamba2"): KEYS,
    ("ejdist/models/config.py", "lightning"): KEYS,
    ("ejdist/models/config.py", "gla"): KEYS,
    ("ejdist/models/config.py", "rwkv7"): KEYS,
    ("benchmarks/peers/fla.py", "rwkv7"): "an operation",
    ("ejdist/models/config.py", "full"): "a kind of layer",
    ("ejdist/models/decoder.py", "experts"): KEYS,
    ("recipes/unread.py", "mlp"): KEYS,
    ("recipes/unread.py", "ungated_mlp"): KEYS,
    ("recipes/unread.py", "experts"): KEYS,
    ("launch/train.py", "experts"): "which recipe scales a model with them",
    ("ejdist/weights/config.py", "window_attention"): RULES,
    ("ejdist/weights/families.py", "experts"): RULES,
    ("ejdist/weights/match.py", "latent_attention"): RULES,
    ("ejdist/weights/match.py", "mlp"): RULES,
    ("ejdist/weights/match.py", "ungated_mlp"): RULES,
    ("ejdist/weights/match.py", "experts"): RULES,
    ("ejdist/weights/names.py", "attention"): RULES,
    ("ejdist/weights/names.py", "latent_attention"): RULES,
    ("ejdist/weights/names.py", "mlp"): RULES,
    ("ejdist/weights/names.py", "mamba2"): RULES,
    ("ejdist/weights/names.py", "ungated_mlp"): RULES,
    ("ejdist/weights/state_spaces.py", "mlp"): "a type of layer in a config.json",
    ("ejdist/weights/state_spaces.py", "attention"): "a type of layer in a config.json",
    ("ejdist/cluster/section.py", "local"): "a value of cluster.kind",
    ("ejdist/training/optimizer.py", "offload"): "a key of the optimizer",
    ("launch/train.py", "local"): "a value of cluster.kind",
    ("benchmarks/experts.py", "experts"): "an option of the benchmark",
    ("benchmarks/step.py", "attention"): "a scope of a profile",
    ("benchmarks/comparisons/grouped_matmul_gpu.py", "none"): "a kind of kernel",
    ("benchmarks/comparisons/moe_models.py", "experts"): "a buffer of the model",
    ("benchmarks/plan.py", "none"): "no case of the benchmark",
    ("benchmarks/__main__.py", "none"): "no library to compare with",
}
_METHODS = {"get", "pop", "setdefault", "startswith", "endswith", "removeprefix", "removesuffix", "index", "count"}


def words_in(*nodes: ast.AST | None) -> Iterator[str]:
    """Yields the strings that stand in these expressions, or in a list, tuple or set of them."""
    for node in nodes:
        if isinstance(node, ast.Constant) and isinstance(node.value, str):
            yield node.value
        elif isinstance(node, (ast.Tuple, ast.List, ast.Set)):
            yield from words_in(*node.elts)


def compared(tree: ast.AST) -> Iterator[tuple[int, str]]:
    """Yields (line, string) for strings that something is compared with, looked up by or listed in: `x == "ring"`,
    `x in ("ring", ...)`, `{"ring": ...}`, `table["ring"]`, `case "ring"`, `x.endswith("ring")`, `{"ring"}`, lists of names."""
    for node in ast.walk(tree):
        found: Iterator[str] = iter(())
        if isinstance(node, ast.Compare):
            found = words_in(node.left, *node.comparators)
        elif isinstance(node, ast.Dict):
            found = words_in(*node.keys)
        elif isinstance(node, ast.Subscript):
            found = words_in(node.slice)
        elif isinstance(node, ast.MatchValue):
            found = words_in(node.value)
        elif isinstance(node, ast.Set):
            found = words_in(node)
        elif isinstance(node, (ast.Tuple, ast.List)) and len(node.elts) > 1:
            words = [*words_in(node)]
            alike = any(names >= set(words) for names, _ in REGISTRIES.values())
            found = iter(words if alike and len(words) == len(node.elts) else ())
        elif isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr in _METHODS:
            found = words_in(*node.args)
        for word in found:
            yield getattr(node, "lineno", 0) or getattr(getattr(node, "value", None), "lineno", 0), word


def written(tree: ast.AST) -> Iterator[tuple[int, str]]:
    """Yields (line, string) for every string but docstrings and the parts of formatted ones."""
    quiet = {id(v) for n in ast.walk(tree) if isinstance(n, ast.JoinedStr) for v in n.values}
    quiet |= {id(n.value) for n in ast.walk(tree) if isinstance(n, ast.Expr)}
    for node in ast.walk(tree):
        if isinstance(node, ast.Constant) and isinstance(node.value, str) and id(node) not in quiet:
            yield node.lineno, node.value


def names_outside(name: str, source: str) -> Iterator[tuple[int, str]]:
    """Yields (line, word) for names of registries in a file that does not declare them. The planner writes none at all."""
    tree = ast.parse(source)
    for line, word in written(tree) if name.startswith(PLANNER) else compared(tree):
        declaring = {file for names, file in REGISTRIES.values() if word in names}
        if declaring and name not in declaring:
            yield line, word


def relative(path: Path) -> str:
    return path.relative_to(ROOT).as_posix()


@pytest.mark.parametrize("path", SOURCES, ids=relative)
def test_a_name_stands_where_it_is_declared(path):
    name = relative(path)
    wrong = [f"{name}:{line}: {word!r}" for line, word in names_outside(name, path.read_text())]
    wrong = [w for w in dict.fromkeys(wrong) if (name, w.split("'")[1]) not in ELSEWHERE]
    assert not wrong, (
        f"{', '.join(wrong)}: ask what the registry holds ({', '.join(d for _, d in REGISTRIES.values())}), or say in "
        "ELSEWHERE what else the word means there"
    )


def test_no_exception_is_stale():
    used = {(relative(p), word) for p in SOURCES for _, word in names_outside(relative(p), p.read_text())}
    assert set(ELSEWHERE) <= used, f"take off the list: {sorted(set(ELSEWHERE) - used)}"


@pytest.mark.parametrize(
    "code",
    [
        "if scheme == 'ring': pass",
        "if 'ring' != scheme: pass",
        "x = remat in ('attention', 'other')",
        "x = {'mlp': 1}.get(part.name)",
        "x = table['zigzag']",
        "x = name.endswith('attention')",
        "x = parts & {'experts', 'other'}",
        "match order:\n    case 'striped': pass",
        "KNOWN = ('ring', 'all_gather')",
        "KNOWN = ['none', 'dots', 'full']",
    ],
)
def test_the_ways_to_write_a_name(code):
    assert [*names_outside("ejdist/operations.py", code)], code
    assert [*names_outside("ejdist/planning/search.py", code)], code


@pytest.mark.parametrize(
    "code",
    ["scheme: str = 'ring'", "f(scheme='ring')", "x = f'a ring, {n} none'", "'''ring'''", "x = ('ring', 'of', 'keys')"],
)
def test_what_is_not_a_comparison(code):
    assert not [*names_outside("ejdist/operations.py", code)], code


def test_the_planner_writes_no_name_at_all():
    assert [*names_outside("ejdist/planning/search.py", "scheme = 'ring'")]
