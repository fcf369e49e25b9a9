"""Faults of the local tier by pieces: which step is whole, what a piece is taken for, who gets it, and what is removed."""

from faults import Fault

PIECES, TIER = "tests/test_pieces.py", "tests/test_local_tier.py"

FAULTS = (
    Fault(
        "a run resumes from a step of which pieces are missing",
        "local_plan:plan_of",
        "$needed <= $shares",
        "$needed & $shares",
        f"{PIECES} -k newest_step",
    ),
    Fault(
        "only hosts with all of their own pieces count",
        "local_plan:plan_of",
        "set[str]().union(*$held[$save].values())",
        "set.intersection(*$held[$save].values())",
        f"{PIECES} -k newest_step",
    ),
    Fault(
        "a machine that was away brings back steps that the run has gone back over",
        "local_plan:_is_current",
        "all($$rule)",
        "True",
        f"{PIECES} -k newest_step",
    ),
    Fault(
        "pieces of two states of one step are mixed",
        "LocalCheckpoints.common",
        "$one.save == Save(*$save)",
        "$one.save.step == $save[0]",
        f"{PIECES} -k not_mixed",
    ),
    Fault(
        "the states of two starts are taken for one save",
        "local_pieces:save_of",
        "Save($step, $start, $$state)",
        "Save($step, 0, $$state)",
        f"{TIER} -k gone_back",
    ),
    Fault(
        "a damaged piece is a piece",
        "Pieces.find",
        "len($part) == $size and zlib.crc32($part) == $crc32",
        "len($part) == $size",
        f"{PIECES} -k damaged_piece",
    ),
    Fault(
        "a file that is cut has all its shares",
        "Stored.read",
        "(path / PIECES).stat().st_size >= $end",
        "True",
        f"{TIER} -k damage_is_refused",
    ),
    Fault(
        "bytes from another host are not compared with their checksum",
        "PieceWriter.add",
        "$crc32 is not None and $found != $crc32",
        "False",
        f"{PIECES} -k breaks_off",
    ),
    Fault(
        "what a host that broke off has sent stays in the file",
        "PieceWriter.add",
        "self._back_to($start)\nraise",
        "raise",
        f"{PIECES} -k breaks_off",
    ),
    Fault(
        "who does not know the key gets pieces",
        "PieceServer._serve",
        "not hmac.compare_digest($$keys)",
        "False",
        f"{PIECES} -k know_the_key",
    ),
    Fault(
        "pieces go to whoever has a certificate by the authority",
        "PieceServer._serve",
        "not is_ours($connection)",
        "False",
        f"{PIECES} -k certificates",
    ),
    Fault(
        "hosts with other shares are not asked",
        "peers:gather",
        "ask($topic, sorted($absent), _OTHERS)",
        "pass",
        f"{PIECES} -k breaks_off",
    ),
    Fault(
        "all hosts are tried though the network lets nothing through",
        "peers:gather",
        "len($failed) < _FAILED",
        "True",
        f"{PIECES} -k network",
    ),
    Fault(
        "what describes a checkpoint comes from host 0, which may be the new machine",
        "Hosts.broadcast",
        "if self.index == $source:\n    _put($key, $value)",
        "if self.index == 0:\n    _put($key, $value)",
        f"{PIECES} -k gets_them_from_a_replica",
    ),
    Fault(
        "the folder of another process on this disk is emptied",
        "LocalCheckpoints._is_written",
        "(folder / _START).read_text() == str(self.start)",
        "False",
        f"{TIER} -k earlier_starts",
    ),
    Fault(
        "a host may have removed the step before its replica has the next",
        "_KEPT",
        "2",
        "1",
        f"{TIER} -k three_stay",
    ),
    Fault(
        "the pieces of a pod go with it",
        "gke_jobset:_pod",
        "{'path': $o.local_disk, 'type': 'DirectoryOrCreate'}",
        "{'path': '/tmp/' + $o.name, 'type': 'DirectoryOrCreate'}",
        "tests/test_gke.py -k outlives",
    ),
)
