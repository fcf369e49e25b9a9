"""Faults of checkpoints: what is kept, where, when, and what of it is taken for whole."""

from faults import Fault

INTEGRITY, STORED = "ejdist/training/integrity.py", "ejdist/training/stored.py"
CHECKPOINT, SAVES, LOCAL = (f"ejdist/training/{name}.py" for name in ("checkpoint", "saves", "local_tier"))
SERIES = "launch/series.py"
DAMAGE, TIER, STORE = "tests/test_damage.py", "tests/test_local_tier.py", "tests/test_object_store.py"

FAULTS = (
    Fault(
        "a host that has read its part waits for one that cannot",
        CHECKPOINT,
        "            return handler.restore(self.directory / str(step) / what, args=args)\n",
        "            import orbax.checkpoint as ocp\n\n"
        "            return ocp.Checkpointer(handler).restore(self.directory / str(step) / what, args=args)\n",
        "tests/test_checkpoint.py -k read_waits_for_no_other",
    ),
    Fault(
        "each host judges what describes a checkpoint for itself",
        CHECKPOINT,
        "run, written, kinds = of_all(lambda: self._described(step))",
        "run, written, kinds = self._described(step)",
        "tests/test_checkpoint.py -k none_restores",
    ),
    Fault(
        "what stands beside the arrays is not checked",
        INTEGRITY,
        "if written is not None and checksum(run) != written:",
        "if False:",
        f"{DAMAGE} -k still_json",
    ),
    Fault(
        "a checksum whose name is damaged is as if there were none",
        INTEGRITY,
        "changed = sorted(name for name in {*found, *written} if found.get(name) != written.get(name))\n    if changed:\n"
        '        raise Changed(f"{_named',
        "changed = sorted(name for name in found if found[name] != written.get(name))\n    if changed:\n"
        '        raise Changed(f"{_named',
        f"{DAMAGE} -k still_json",
    ),
    Fault(
        "a file that is no JSON any more is not named",
        INTEGRITY,
        "        except (OSError, ValueError, LookupError, TypeError, AttributeError):  # not JSON, or without a key\n"
        '            return f"{name}: "',
        "        except (OSError, ValueError, LookupError, TypeError, AttributeError):  # not JSON, or without a key\n"
        '            return ""',
        DAMAGE,
    ),
    Fault(
        "checkpoints of before there was a checksum are refused",
        INTEGRITY,
        "if written is not None and checksum(run) != written:",
        "if checksum(run) != written:",
        f"{DAMAGE} -k of_before",
    ),
    Fault(
        "a save that ends in a thread tells JAX of a step that is over",
        CHECKPOINT,
        "        def reached_preemption(self, step: int) -> bool:\n            return False\n",
        "        pass\n",
        "tests/test_checkpoint.py -k where_the_run_is",
    ),
    Fault(
        "a second SIGTERM cuts off the save",
        "ejdist/training/stop.py",
        "        if number == signal.SIGINT:\n            signal",
        "        if True:\n            signal",
        "tests/test_run_files.py -k second_sigterm",
    ),
    Fault(
        "a signal after a rewind is for a step that has been made",
        "ejdist/training/stop.py",
        "reached_preemption_sync_point(self._asked)",
        "reached_preemption_sync_point(step)",
        "tests/test_checkpoint.py -k though_steps_go_back",
    ),
    Fault(
        "what is kept for good goes",
        CHECKPOINT,
        "    if section.keep_every:\n",
        "    if False:\n",
        f"{TIER} -k keeps_by_steps",
    ),
    Fault(
        "hours are taken for minutes",
        CHECKPOINT,
        "round(3600 * section.keep_hours)",
        "round(60 * section.keep_hours)",
        f"{TIER} -k keep_hours_keeps",
    ),
    Fault(
        "each host looks at its own clock",
        SAVES,
        'due, ahead = self._hosts.say("whether a checkpoint is due by time", [left <= 0, ahead])',
        "due = left <= 0",
        f"{TIER} -k another_host",
    ),
    Fault(
        "time is counted from the start, whatever was saved since",
        SAVES,
        "self._since, self._at, self._meet = self._now(), step, step + 1",
        "self._at, self._meet = step, step + 1",
        f"{TIER} -k too_old",
    ),
    Fault(
        "the older of two tiers wins",
        SAVES,
        "key=lambda one: (one[0], one[1] is self.local), reverse=True)",
        "key=lambda one: (one[1] is self.durable, one[0]), reverse=True)",
        f"{TIER} -k newer_of_both",
    ),
    Fault(
        "a copy of a run takes the local checkpoints of the other",
        SAVES,
        'return found["id"] if Path(found["of"]).resolve() == run_dir.resolve() else None',
        'return found["id"]',
        f"{TIER} -k newer_of_both",
    ),
    Fault(
        "pieces of another time are put together",
        LOCAL,
        "            check_digests(arrays, digests)\n",
        "            pass\n",
        f"{TIER} -k another_time",
    ),
    Fault(
        "damaged pieces are taken",
        LOCAL,
        "zlib.crc32(data[at : at + size]) != crc",
        "False",
        f"{TIER} -k damage",
    ),
    Fault(
        "pieces of another mesh are taken for those of this one",
        LOCAL,
        "if all(spans <= set(pieces.get(name, ())) for name, spans in wanted.items()):",
        "if True:",
        f"{TIER} -k no_pieces",
    ),
    Fault(
        "a save that was cut off in a bucket is not seen",
        CHECKPOINT,
        "or (is_step(n) and int(n) not in whole)",
        "",
        f"{STORE} -k in_a_bucket",
    ),
    Fault(
        "a URL is taken for a folder",
        "ejdist/training/places.py",
        "    if value is not None and is_url(value):",
        "    if False:",
        f"{STORE} -k no_url",
    ),
    Fault(
        "a series does not see that a step was lost",
        SERIES,
        "- after.saved > every:",
        "- after.saved > 9 * every:",
        "tests/test_series.py -k may_cost",
    ),
    Fault(
        "a series does not see where the run went on",
        SERIES,
        "int(found[1]) != before.saved",
        "int(found[1]) > before.saved",
        "tests/test_series.py -k apart",
    ),
    Fault(
        "a host that is lost in a save is taken for a disk that fails",
        STORED,
        "        raise_if_lost(error)\n        what =",
        "        what =",
        "tests/test_checkpoint.py -k lost",
    ),
    Fault(
        "a checkpoint is damaged because a host was lost while it was compared",
        CHECKPOINT,
        "            raise_if_lost(error)\n            raise self._damaged",
        "            raise self._damaged",
        "tests/test_checkpoint.py -k lost",
    ),
    Fault(
        "a checkpoint is damaged because a host was lost while it was read",
        CHECKPOINT,
        "                raise_if_lost(error)\n",
        "",
        "tests/test_checkpoint.py -k lost",
    ),
    Fault(
        "an array that a lost host has left without a value is a wrong argument",
        "ejdist/cluster/hosts.py",
        "isinstance(error, ValueError) and _STATUS",
        "False and _STATUS",
        "tests/test_checkpoint.py -k lost",
    ),
    Fault(
        "the others do not hear of a host that only one was talking with",
        "ejdist/cluster/hosts.py",
        "            if not error.known:",
        "            if False:",
        "tests/test_hosts.py -k ends_the_waits",
    ),
    Fault(
        "what a run has just gone on from is forgotten",
        "ejdist/training/local_tier.py",
        "int(path.name) > step",
        "int(path.name) >= step",
        "tests/test_local_tier.py -k what_a_run_goes_on_from",
    ),
    Fault(
        "a second crash finds nothing on the disk of the host",
        "ejdist/training/saves.py",
        "self.local.forget_after(start)",
        "self.local.forget_after(start - 1)",
        "tests/test_local_tier.py -k newer_of_both",
    ),
    Fault(
        "a second damaged checkpoint of a step has no place",
        "ejdist/training/checkpoint.py",
        "            if not aside.exists():\n                break",
        "            break",
        "tests/test_checkpoint.py -k set_aside_too",
    ),
)
