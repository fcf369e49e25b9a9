"""Faults of the Pallas kernels of delta rules."""

from faults import Fault

DELTA = "tests/kernels/test_delta_pallas.py"

FAULTS = (
    Fault(
        "delta on TPUs: a token of a tile of the inverse is not substituted",
        "_tiles_of_inverses",
        "range(TILE - 1)",
        "range(TILE - 2)",
        f"{DELTA} -k inverse",
    ),
    Fault(
        "delta on TPUs: the inverse in one pass of bfloat16",
        "close_product",
        "$both[: $a.shape[0]] + $both[$a.shape[0] :] + product($high, $low)",
        "$both[: $a.shape[0]]",
        f"{DELTA} -k inverse",
    ),
    Fault(
        "delta on TPUs: joined blocks of the inverse are added",
        "pallas_delta_parts:inverses",
        "_odd($x, $size) - close_product($$all)",
        "_odd($x, $size) + close_product($$all)",
        f"{DELTA} -k inverse",
    ),
    Fault(
        "delta on TPUs: sums of decays in one number",
        "precise_sums",
        "return $total, $low - ($total - $high)",
        "return $total, jnp.zeros_like($low)",
        f"{DELTA} -k every_size",
    ),
    Fault(
        "delta on TPUs: a document does not end the one before it",
        "pallas_delta_calls:Launches.gates_of",
        "jnp.where(self.begins[..., None], FORGETS, $a)",
        "$a",
        f"{DELTA} -k documents_and_padding",
    ),
    Fault(
        "delta on TPUs: what padding holds is read",
        "load_heads.put",
        "jnp.where($valid, $x, 0)",
        "$x",
        f"{DELTA} -k documents_and_padding",
    ),
    Fault(
        "delta on TPUs: a sequence goes on from the state of the one before it",
        "pallas_delta:delta_walk_kernel",
        "$x['entries'][0, 0]",
        "scratch['state'][...]",
        f"{DELTA} -k packed_sequences",
    ),
    Fault(
        "delta on TPUs: a visit clears what another wrote of its block",
        "store_heads",
        "jnp.where($more, $ref[0, :, $h, :] + $x, $x)",
        "$x",
        f"{DELTA} -k packed_sequences",
    ),
    Fault(
        "delta on TPUs: the gradient of a rate lacks what goes through the inverse",
        "pallas_delta:delta_reverse_kernel.heads_of",
        "_across($du[$j] * $known[$j]) + _across($straight)",
        "_across($du[$j] * $known[$j])",
        f"{DELTA} -k correlated",
    ),
    Fault(
        "delta on TPUs: the gradient of a decay lacks what is written before it",
        "pallas_delta:delta_reverse_kernel.heads_of",
        "running_sums($writes) - $writes",
        "0 * $writes",
        f"{DELTA} -k correlated",
    ),
    Fault(
        "delta on TPUs: the gradient of a state lacks what its keys read",
        "pallas_delta:delta_reverse_kernel.heads_of",
        "jnp.concatenate([narrow($known[$j]), narrow($read[$j])])",
        "jnp.concatenate([0 * narrow($known[$j]), narrow($read[$j])])",
        f"{DELTA} -k correlated",
    ),
    Fault(
        "delta on TPUs: a cut belongs to the sequence after it",
        "pallas_visits:visits",
        "($starts <= $cuts[..., None]) & ($starts < $T)",
        "$starts < $T",
        f"{DELTA} -k visit",
    ),
    Fault(
        "delta on TPUs: decays of channels are taken for those of a head",
        "delta_rule/pallas_tpu:rejects",
        "$call.g is not None and $call.g.shape[-1] > 1",
        "False",
        f"{DELTA} -k refused",
    ),
    Fault(
        "delta on TPUs: a backward walks again for states that were kept",
        "pallas_delta_calls:Launches.backward",
        "$names[0] in $saved",
        "False",
        "tests/test_kept_arrays.py -k 'walk_once and delta'",
    ),
    Fault(
        "delta on TPUs: inverses are not among what is kept",
        "pallas_delta_calls:kept_of",
        "$states | ({'solve': jax.ShapeDtypeStruct($$all)} if $delta else {})",
        "$states",
        "tests/test_kept_arrays.py -k 'walk_once and delta'",
    ),
    Fault(
        "delta on TPUs: kept states are as narrow as an even number of heads would have them",
        "pallas_delta_calls:kept_of",
        "$dtype if in_words($dtype, $heads) else 'float32'",
        "$dtype",
        "tests/test_kept_arrays.py -k odd",
    ),
    Fault(
        "plans: inverses of delta rules are not counted",
        "recurrent_size:Size.memory",
        "self.stored / $tokens[1] + self.inverses",
        "self.stored / $tokens[1]",
        "tests/test_recurrent_costs.py -k 'count_what'",
    ),
)
