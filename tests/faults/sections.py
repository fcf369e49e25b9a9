"""Faults of the sections of recipes: what they check, which keys decide a resumed run, and what layers are made of."""

from faults import Fault

SECTIONS, TESTS = "ejdist/sections.py", "tests/test_sections.py"

FAULTS = (
    Fault(
        "a key of a section that nobody classified decides nothing",
        SECTIONS,
        "self.declared.metadata.get(_DECIDES, True)",
        "self.declared.metadata.get(_DECIDES, False)",
        TESTS,
    ),
    Fault(
        "a section that holds another does not check it",
        SECTIONS,
        "                validate(one)\n",
        "                pass\n",
        TESTS,
    ),
    Fault(
        "keys of sections in a list are left out",
        SECTIONS,
        '                yield from keys_of(one, f"{name}[{i}].")',
        "                pass",
        TESTS,
    ),
    Fault(
        "a key that is gone does not count",
        "ejdist/training/resume.py",
        "gone = sorted(set(stored) - set(keys))",
        "gone = []",
        TESTS,
    ),
    Fault(
        "another spelling of a kind of layer is another run",
        "ejdist/sections.py",
        "return self.declared.metadata.get(_CANONICAL, lambda same: same)(value)",
        "return value",
        TESTS,
    ),
    Fault(
        "a dim of a parameter that no layout knows is stored whole",
        "ejdist/models/model.py",
        "check_declared(",
        "bool(",
        f"{TESTS} -k dim",
    ),
    Fault(
        "a layer without a feed-forward has one",
        "ejdist/models/config.py",
        'for name in (MIXERS.get(mixer, mixer), feed_forward) if name not in ("", NONE))',
        'for name in (MIXERS.get(mixer, mixer), feed_forward.replace(NONE, "mlp")) if name not in ("", NONE))',
        "tests/test_layers.py",
    ),
    Fault(
        "the layers of a stage count from 0",
        "ejdist/models/stack.py",
        "jnp.int32(which.start), head, in_scan=False",
        "jnp.int32(0), head, in_scan=False",
        f"{LAYERS} -k stages_are",
    ),
    Fault(
        "a stage that begins inside a round takes the pattern from its beginning",
        "ejdist/models/stack.py",
        "begin += -(-max(which.start - begin, 0) // len(pattern)) * len(pattern)",
        "begin += max(which.start - begin, 0)",
        f"{LAYERS} -k stages_are",
    ),
    Fault(
        "the rows of a stage begin at the first layer",
        "ejdist/models/stack.py",
        "slice(before[name], before[name] + own[name])",
        "slice(0, own[name])",
        f"{LAYERS} -k stages_are",
    ),
    Fault(
        "a stage takes rows of other layers",
        "ejdist/models/stack.py",
        "            if stack.shape[0] != needed:",
        "            if stack.shape[0] < needed:",
        f"{LAYERS} -k no_rows",
    ),
    Fault(
        "stacks of layers have no dim of the layout",
        "ejdist/models/parameters.py",
        'dims=f"L {self.dims}"',
        'dims=f"_ {self.dims}"',
        f"{MODEL} -k layout",
    ),
)
