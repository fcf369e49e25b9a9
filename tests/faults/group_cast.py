"""Faults of a group-cast (ejdist/sequence/group_cast.py), of the chunks that it sends and of what is planned of it."""

from faults import Fault

TESTS = "tests/test_group_cast.py"
SENT = f"{TESTS} -k and_no_more"
NUMBERS = f"{TESTS} -k 'numbers_of_one_device and sinks'"
COSTS = "tests/test_declared_costs.py"

FAULTS = (
    Fault(
        "a chunk that nobody needs is listed",
        "Listed.slots",
        "$turn * $room + jnp.arange($room) < self.count",
        "$turn * $room + jnp.arange($room) <= self.count",
        f"{TESTS} -k lists",
    ),
    Fault(
        "chunks that nobody needs are listed among the others",
        "Listed.of",
        "$count + jnp.cumsum(~$needed, -1) - 1",
        "jnp.cumsum(~$needed, -1) - 1",
        f"{TESTS} -k lists",
    ),
    Fault(
        "what fills no whole pass is not sent",
        "Cast.of",
        "-(-$needs.sum(-1, dtype=jnp.int32).max() // $room)",
        "$needs.sum(-1, dtype=jnp.int32).max() // $room",
        SENT,
    ),
    Fault(
        "a rank is sent its own chunks",
        "Cast.of",
        "$met.any(1).reshape($met.shape[0], $n, -1) & (jnp.arange($n) != $rank)[:, None]",
        "$met.any(1).reshape($met.shape[0], $n, -1)",
        SENT,
    ),
    Fault(
        "a rank sends the chunks that it would need",
        "Cast.of",
        "exchange.all_to_all($needs.astype(jnp.int32), $local.axis, split=1, join=1) > 0",
        "$needs",
        SENT,
    ),
    Fault(
        "of a mask without documents a rank sends the chunks that it would need",
        "Cast.of",
        "($table, $table.swapaxes(0, 1))",
        "($table, $table)",
        f"{TESTS} -m slow -k 'soft_cap and numbers_of_one'",
    ),
    Fault(
        "chunks go as far back as they should go on",
        "Cast._by_pairs",
        "$way * ($h + 1)",
        "-$way * ($h + 1)",
        f"{TESTS} -k as_far_as",
    ),
    Fault("an empty slot is a key that is seen", "Cast.placed", "jnp.where($there[..., None], $ids, -1)", "$ids", SENT),
    Fault(
        "empty slots stand among the others, and the last of these are lost",
        "Cast._in_text",
        "jnp.where($there, _taken($first, $at), _NOWHERE)",
        "_taken($first, $at)",
        SENT,
    ),
    Fault(
        "gradients go back in the order of the text",
        "Cast.back",
        "self._in_text(*self._slots($turn))",
        "jnp.arange(self._slots($turn)[0].shape[1])[None] + 0 * self._in_text(*self._slots($turn))",
        SENT,
    ),
    Fault(
        "gradients of all rows are added to the first one",
        "Cast.added",
        "jnp.arange($batch)[:, None] * $chunks",
        "0 * jnp.arange($batch)[:, None]",
        NUMBERS,
    ),
    Fault("a pass brings the chunks of the one before", "_made.visit", "$turn + 1", "$turn", SENT),
    Fault(
        "what goes back is laid as this pass is",
        "_made.visit",
        "cast.back($made, $turn - 1)",
        "cast.back($made, $turn)",
        SENT,
    ),
    Fault(
        "what came back is added where this pass has its chunks",
        "_made.step",
        "cast.added($sums, $arrived, $turn - 1)",
        "cast.added($sums, $arrived, $turn)",
        SENT,
    ),
    Fault(
        "gradients of the last pass do not go home",
        "_made.ended",
        "($stay, cast.added($sums, $arrived, $turn))",
        "($stay, $sums)",
        SENT,
    ),
    Fault(
        "a pass before the last is left out",
        "_made.several",
        "jax.lax.fori_loop(1, $$rest)",
        "jax.lax.fori_loop(2, $$rest)",
        SENT,
    ),
    Fault(
        "the gradient of the queries is that of the last pass",
        "pulls.brought",
        "{$n: $x + $grads[$n] for $n, $x in widened($own).items()}",
        "{$n: $grads[$n] for $n, $x in widened($own).items()}",
        SENT,
    ),
    Fault(
        "of the keys before the last chunk are seen",
        "_chunks",
        "$last[$some] + 1",
        "$last[$some]",
        f"{TESTS} -k of_pairs",
    ),
    Fault(
        "a chunk sees what its last query does",
        "chunks_of_rows",
        "$first[$row].reshape(-1, $chunk).min(1)",
        "$first[$row].reshape(-1, $chunk).max(1)",
        f"{TESTS} -k of_pairs",
    ),
    Fault(
        "a buffer has room for chunks of a rank itself",
        "capacity",
        "math.ceil($buffer * $chunks / ($ranks - 1))",
        "math.ceil($buffer * $chunks / $ranks)",
        f"{TESTS} -k room_is",
    ),
    Fault(
        "gradients that go back cost nothing",
        "GroupCast.cost",
        "$shape.forwards + 2",
        "$shape.forwards + 1",
        f"{COSTS} -k 'sends_what_it_declares and group_cast'",
    ),
    Fault(
        "a recipe's buffer is not used",
        "SequenceSection._options",
        "None if self.buffer == 1 else self.buffer",
        "None",
        f"{TESTS} -k says_the_buffer",
    ),
)
