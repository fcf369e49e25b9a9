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
)
