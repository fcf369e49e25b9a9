"""Faults of what hosts share, of what is read from a bucket, and of who owns a folder of one."""

from faults import Fault

READ, LOCK, HOSTS = "tests/test_buckets.py", "tests/test_bucket_lock.py", "tests/test_hosts.py"

FAULTS = (
    Fault(
        "run.dir must be shared, wherever the checkpoints are",
        "Saves.check_shared",
        "self.section.dir is None",
        "True",
        f"{HOSTS} -k shared_where",
    ),
    Fault(
        "what hosts share is checked once a program is compiled",
        "_train",
        "$opened.saves.check_shared()",
        "",
        "tests/test_object_store.py -k refused_before",
    ),
    Fault(
        "only host 0 need be able to write where all save",
        "check_shared",
        "SharedFolder($folder, $hosts.index, $token, writes=$failure is None)",
        "SharedFolder($folder, $hosts.index, $token, writes=False)",
        f"{HOSTS} -k cannot_write_where",
    ),
    Fault(
        "hosts wait for what host 0 cannot write",
        "check_shared",
        "$failure is None and $mine.failure is None and $mine.sees_first(min(_SEEN_WITHIN, $hosts.limit / 2))",
        "$mine.failure is None and $mine.sees_first(20.0)",
        f"{HOSTS} -k cannot_write_where",
    ),
    Fault(
        "an object is known by its size alone",
        "BucketPath.stat",
        "int($info['generation'])",
        "0",
        f"{READ} -k another_object",
    ),
    Fault(
        "objects with a dot in front are read",
        "BucketPath.glob",
        "not any(($p.startswith('.') for $p in $below[$name]))",
        "True",
        f"{READ} -k every_format",
    ),
    Fault(
        "a range of an object ends a byte early",
        "_Raw._read",
        "min($at + _CHUNK, $end)",
        "min($at + _CHUNK, $end - 1)",
        f"{READ} -k every_format",
    ),
    Fault(
        "weights are read from whatever replaced them",
        "read_header",
        "$path = $path.at($facts.st_mtime_ns)",
        "pass",
        f"{READ} -k replaced_or_cut_off",
    ),
    Fault(
        "of a tensor all is read",
        "RemoteTensor.__array__",
        "self._memory.read($first - $start, $end - $start)",
        "self._memory.read(0, self._memory.content.size)",
        f"{READ} -k only_what_is_taken",
    ),
    Fault(
        "a part of a tensor that has been read is read again",
        "_Memory.read",
        "self._read[$chunks] = True",
        "",
        f"{READ} -k only_what_is_taken",
    ),
    Fault(
        "a bucket without gcsfs is opened",
        "source_path",
        "check_installed($key, $value, ('gcsfs',))",
        "",
        f"{READ} -k without_gcsfs",
    ),
    Fault(
        "a store that does not answer ends the run for good",
        "is_unreachable",
        "$error = $error.__cause__",
        "$error = None",
        f"{READ} -k does_not_answer",
    ),
    Fault(
        "what a store forbids is asked for again and again",
        "_reaching",
        "is_retriable($error) or isinstance($error, (ConnectionError, TimeoutError))",
        "True",
        f"{READ} -k does_not_answer",
    ),
    Fault(
        "the owner of a bucket is replaced, whoever it is",
        "BucketLock._write",
        "$blob.upload_from_string(json.dumps(asdict($owner)), if_generation_match=$generation, **$how)",
        "$blob.upload_from_string(json.dumps(asdict($owner)), **$how)",
        f"{LOCK} -k 'at_once or taken_over_by_one'",
    ),
    Fault(
        "who owned a bucket writes over who owns it",
        "BucketLock.renew",
        "self._mine is not None and $owner.id == self._mine.id",
        "self._mine is not None",
        f"{LOCK} -k writes_no_more",
    ),
    Fault(
        "a bucket stays owned after the run",
        "BucketLock._delete",
        "$blob.delete(if_generation_match=self._generation, **$how)",
        "pass",
        f"{LOCK} -k keeps_it_while",
    ),
)
