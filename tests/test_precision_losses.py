"""`benchmarks.precisions`: the table of losses, and runs that are compared."""

import json

import numpy as np
import pytest

from benchmarks import precisions


def curve(last, steps=200):
    return np.linspace(3.0, last, steps).round(4).tolist()


@pytest.mark.slow
def test_the_table_pairs_runs_of_one_seed(tmp_path):
    """A precision that follows bfloat16 from every seed is as near as that, however far apart the seeds are."""
    result = {"span": 100, "losses": {"bf16": [curve(2.0), curve(1.0)], "fp8_block": [curve(2.02), curve(1.01)]}}
    bf16, block = precisions.table(result).splitlines()[2:]
    mean = np.mean([2.2612 / 2.2462 - 1, 1.5 / 1.4925 - 1])
    assert "apart" in bf16 and float(bf16.split("up to ")[1].split("%")[0]) == pytest.approx(50.2, abs=1)
    shown, error = (float(x.strip(" +%")) for x in block.split("|")[3:5])
    assert shown == pytest.approx(100 * mean, abs=0.1) and 0 < error < 0.2
    result["losses"]["fp8_row"] = [curve(2.0)]
    assert precisions.table(result).splitlines()[-1].endswith("+0.00% | one pair has none |")
    precisions.draw({**result, "steps": 200}, tmp_path / "curves.png")
    assert (tmp_path / "curves.png").stat().st_size > 1000


def test_each_precision_is_trained_from_each_seed(tmp_path, monkeypatch):
    asked = []

    def losses_of(words, steps, recipe):
        asked.append(words.split())
        return curve(2.0, steps)

    monkeypatch.setattr(precisions, "losses_of", losses_of)
    precisions.main(
        ["steps=200", "seeds=3", "precisions=fp8_row,fp8_row+head", "model.num_layers=2", f"out={tmp_path / 'x.json'}"]
    )
    seeds = [f"run.seed={n}" for n in range(3)]
    ways = (
        ["model.precision=bf16"],
        ["model.precision=fp8_row"],
        ["model.precision=fp8_row", "model.precision_head=true"],
    )
    runs = [["model.num_layers=2", *keys, seed] for keys in ways for seed in seeds]
    assert asked == runs
    losses = json.loads((tmp_path / "x.json").read_text())["losses"]
    assert {name: len(of) for name, of in losses.items()} == {"bf16": 3, "fp8_row": 3, "fp8_row+head": 3}


def test_results_of_several_devices_are_joined(tmp_path, monkeypatch):
    monkeypatch.setattr(precisions, "losses_of", lambda words, steps, recipe: curve(2.0 + int(words[-1]), steps))
    files = [str(tmp_path / f"{first}.json") for first in (0, 2)]
    for first, file in zip((0, 2), files, strict=True):
        precisions.main(["steps=200", "seeds=2", f"first={first}", "precisions=fp8_row", f"out={file}"])
    out = tmp_path / "all.json"
    precisions.main([f"join={','.join(files)}", f"out={out}"])
    result = json.loads(out.read_text())
    assert result["seeds"] == [0, 1, 2, 3]
    assert [x[-1] for x in result["losses"]["fp8_row"]] == [2.0, 3.0, 4.0, 5.0]
    with pytest.raises(SystemExit, match="seeds of their own; two have \\[0, 1\\]: give first="):
        precisions.main([f"join={files[0]},{files[0]}", f"out={out}"])
    (tmp_path / "other.json").write_text(json.dumps({**result, "steps": 400}))
    with pytest.raises(SystemExit, match="steps must be the same in all results, got 200 and 400"):
        precisions.main([f"join={files[0]},{tmp_path / 'other.json'}", f"out={out}"])
    stopped = {**result, "losses": {**result["losses"], "fp8_row": result["losses"]["fp8_row"][:1]}}
    (tmp_path / "other.json").write_text(json.dumps(stopped))
    for words, message in (
        (
            [f"join={files[0]},{tmp_path / 'other.json'}", f"out={out}"],
            "result 2 has 1 of 4 runs of fp8_row: it was stopped",
        ),
        ([f"join={files[0]},{tmp_path / 'none.json'}", f"out={out}"], "there is no file '.*none.json'"),
        ([f"join={files[0]}", "seeds=7", f"out={out}"], "leave out seeds=7"),
        ([f"join={files[0]}"], "give the file to write"),
        ([f"join={files[0]}", "model=1b", f"out={out}"], "leave out model=1b"),
    ):
        with pytest.raises(SystemExit, match=message):
            precisions.main(words)
    with pytest.raises(ValueError, match=r"model\.precision = 'fp9' is unknown"):
        precisions.main(["precisions=fp9", f"out={out}"])
