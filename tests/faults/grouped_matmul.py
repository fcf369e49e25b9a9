"""Faults of grouped_matmul."""

from faults import Fault

GROUPED = "tests/kernels/test_grouped_matmul.py"
KERNELS = "tests/kernels/test_grouped_matmul_kernels.py"

FAULTS = (
    Fault(
        "grouped matmul: rows of the next group in the gradient of a matrix",
        "kernels/ops/grouped_matmul/xla.py",
        "x, d = _rows(padded, first, size, end), _rows(d_padded, first, size, end)",
        "x, d = _rows(padded, first, size), _rows(d_padded, first, size)",
        GROUPED,
    ),
    Fault(
        "grouped matmul: rows past the last group are not zero",
        "kernels/ops/grouped_matmul/xla.py",
        "return _inside(groups, out, rows)",
        "return out[:rows]",
        GROUPED,
    ),
    Fault(
        "grouped matmul: the last rows of a group left out",
        "kernels/ops/grouped_matmul/xla.py",
        "(size - 1 if size == TILES[-1] else 0)",
        "0",
        GROUPED,
    ),
    Fault(
        "grouped matmul: rows of a device take the sizes of all",
        "ejdist/grouped_matmul.py",
        "jnp.pad(jnp.cumsum(group_sizes), (1, 0)) - first",
        "jnp.pad(jnp.cumsum(group_sizes), (1, 0)) - 0 * first",
        f"{GROUPED} -k mesh",
    ),
    Fault(
        "grouped matmul: every device adds the bias",
        "ejdist/grouped_matmul.py",
        "jnp.where(jax.lax.axis_index(features) == 0, bias, 0)",
        "bias",
        f"{GROUPED} -k mesh",
    ),
    Fault(
        "grouped matmul in Triton: rows of the next group in the gradient of a matrix",
        "kernels/ops/grouped_matmul/triton_kernels.py",
        "wide, inner = rows.to(tl.int64), rows < end",
        "wide, inner = rows.to(tl.int64), rows < end + 1",
        f"{KERNELS} -k 'several and triton'",
    ),
    Fault(
        "grouped matmul in Triton: the end of a group's last tile is the next group's",
        "kernels/ops/grouped_matmul/triton_kernels.py",
        "mask = (rows < end)[:, None] & inner[None, :]",
        "mask = (rows < end + 1)[:, None] & inner[None, :]",
        f"{KERNELS} -k 'several and triton'",
    ),
    Fault(
        "grouped matmul in Triton: the last rows of a group are not in the gradient of its matrix",
        "kernels/ops/grouped_matmul/triton_kernels.py",
        "for row in tl.range(rest, end, BLOCK_K, num_stages=STAGES):",
        "for row in tl.range(rest, end - 1, BLOCK_K, num_stages=STAGES):",
        f"{KERNELS} -k 'several and triton'",
    ),
    Fault(
        "grouped matmul in Triton: scales of columns where the gradient of the rows needs those of rows",
        "kernels/ops/grouped_matmul/triton_gpu.py",
        'scale=scales("rows", scale)',
        'scale=scales("columns", scale)',
        f"{KERNELS} -k 'eight and triton or every_code'",
    ),
    Fault(
        "grouped matmul in Triton: a float8 has the exponent of a float16",
        "kernels/ops/grouped_matmul/triton_kernels.py",
        "half.to(tl.float32) * 256.0",
        "half.to(tl.float32) * 128.0",
        f"{KERNELS} -k 'eight and triton or every_code'",
    ),
    Fault(
        "grouped matmul in Gluon: a bias is left out by warps that know none",
        "kernels/ops/grouped_matmul/triton_gpu.py",
        "    plain = bias is None and activation is None",
        "    plain = activation is None",
        f"{KERNELS} -k which_products",
    ),
    Fault(
        "grouped matmul in Gluon: steps that a contracted dim has no entries for",
        "kernels/ops/grouped_matmul/triton_gpu.py",
        "and K % SPECIALISED[tile.specialised].block_k == 0:",
        "and K % 8 == 0:",
        f"{KERNELS} -k which_products",
    ),
    Fault(
        "grouped matmul in Gluon: instructions of Hopper on what is not one",
        "kernels/ops/grouped_matmul/triton_gpu.py",
        "and compute_capability() == 90",
        "and compute_capability() >= 90",
        f"{KERNELS} -k which_products",
    ),
    Fault(
        "grouped matmul in Pallas: scales of the columns left out",
        "kernels/ops/grouped_matmul/pallas_tpu.py",
        "z = [x * scale[0].astype(jnp.float32) for x, scale in zip(z, scale_refs)]",
        "z = [x for x, scale in zip(z, scale_refs)]",
        f"{KERNELS} -k 'eight and pallas'",
    ),
    Fault(
        "grouped matmul in Triton: the right half of a tile in two parts is written over the left",
        "kernels/ops/grouped_matmul/triton_kernels.py",
        "end, n + PART,",
        "end, n,",
        f"{KERNELS} -k 'several and triton'",
    ),
    Fault(
        "grouped matmul in Triton: rows of no group are not written",
        "kernels/ops/grouped_matmul/triton_kernels.py",
        "empty = tl.load(bounds_ptr + 2 * E + 1) - tiles_m",
        "empty = tl.load(bounds_ptr + 2 * E) - tiles_m",
        f"{KERNELS} -k 'several and triton'",
    ),
    Fault(
        "grouped matmul in Triton: sizes are not counted from the offset",
        "kernels/ops/grouped_matmul/triton_kernels.py",
        "size = tl.load(sizes_ptr + first + e, mask=mine, other=0)",
        "size = tl.load(sizes_ptr + e, mask=mine, other=0)",
        f"{KERNELS} -k map",
    ),
    Fault(
        "grouped matmul in Pallas: a block of rows is not kept for its next group",
        "kernels/ops/grouped_matmul/pallas_tpu.py",
        "fresh = (v == 0) | (block[v] != block[jnp.maximum(v, 1) - 1])",
        "fresh = v >= 0",
        f"{KERNELS} -k 'several and pallas'",
    ),
    Fault(
        "grouped matmul in Pallas: rows of other groups in the gradient of a matrix",
        "kernels/ops/grouped_matmul/pallas_tpu.py",
        "_kept(ref[...], 0, first, begin[v], end[v])",
        "_kept(ref[...], 0, first, 0, end[v])",
        f"{KERNELS} -k 'several and pallas'",
    ),
    Fault(
        "grouped matmul: the gradient of matrices that are transposed is that of others",
        "kernels/ops/grouped_matmul/groups.py",
        '"rhs_transposed", rhs_transposed, d, lhs',
        '"rhs_transposed", rhs_transposed, lhs, d',
        "tests/test_ops.py -k 'numbers and grouped_matmul-transposed'",
    ),
)
