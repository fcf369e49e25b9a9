"""`python -m launch`: lists the commands."""

from __future__ import annotations

import sys

# In the order in which a project meets them.
COMMANDS = {
    "train": "trains a recipe, or resumes a run",
    "plan": "finds mesh, remat, accumulation, batch and schemes that fit devices which need not be there",
    "tokenize": "turns files into a dataset, once, for every run",
    "evaluate": "measures a trained model at each length: loss by position, recall from the context, RULER",
    "generate": "writes texts of a trained model: prompts of the command line, a file or stdin",
    "report": "writes a page about a run: loss, speed, where the time went, experts, recipe",
    "export": "writes a run as a folder that transformers and others load",
    "doctor": "checks that a cluster is fit for a run; trains nothing",
    "local": "trains with several processes on this machine",
    "slurm": "trains as a Slurm job that is requeued until the run is done",
    "gke": "trains as a Kubernetes JobSet, on TPU slices or GPUs",
    "tpu_vm": "trains on all machines of a TPU slice, or any machines, over ssh",
    "rehearse": "trains with injected faults and reports what each costs",
}


def main(argv: list[str] | None = None) -> int:
    """Prints the commands and returns an exit code: 2 for a word, which is answered with what starts that command."""
    words = sys.argv[1:] if argv is None else argv
    if words and words[0] not in ("-h", "--help"):
        is_command = words[0].replace("-", "_") in COMMANDS
        hint = (
            f"write python -m launch.{words[0].replace('-', '_')}"
            if is_command
            else "python -m launch lists the commands"
        )
        print(f"error: cannot read {words[0]!r}: {hint}", file=sys.stderr)
        return 2
    print("usage: python -m launch.COMMAND [KEY=VALUE ...]\n")
    print("\n".join(f"  launch.{name:9} {what}" for name, what in COMMANDS.items()))
    print("\n--help after a command lists its keys, and --help KEY tells what one of them means.")
    print("python -m kernels prints what each operation supports; README.md begins with a run.")
    return 0


if __name__ == "__main__":
    sys.exit(main())
