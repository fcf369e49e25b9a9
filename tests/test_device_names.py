"""The names of devices and slices that a plan takes."""

import pytest

from ejdist.planning.chips import CHIPS
from ejdist.planning.names import NAMES
from ejdist.planning.targets import GPUS, target_of


@pytest.mark.parametrize(
    ("device", "devices", "name", "count"),
    [
        # Two TensorCores on a chip: the cloud counts them, JAX counts chips.
        ("v5p-128", None, "v5p:4x4x4", 64),
        ("v5p-128", 64, "v5p:4x4x4", 64),
        ("tpu v4-8", None, "v4:2x2x1", 4),
        ("v5p-12288", None, "v5p:16x16x24", 6144),
        ("v5p-384", None, "v5p:4x4x12", 192),
        # One TensorCore on a chip.
        ("v6e-256", None, "v6e:16x16", 256),
        ("v5litepod-16", None, "v5e:4x4", 16),
        ("V5_LITE-8", None, "v5e:2x4", 8),
        # Two on a chip, and JAX shows them both.
        ("tpu7x-128", None, "tpu7x:4x4x4", 128),
        ("ironwood", 128, "tpu7x:4x4x4", 128),
        ("trillium", 64, "v6e:8x8", 64),
        ("tpu-v5-lite-podslice", 4, "v5e:2x2", 4),
        ("v5p:2x2x2", None, "v5p:2x2x2", 8),
        ("H200", 16, "16 x h200", 16),
        ("8xH100", None, "8 x h100", 8),
        ("h100:8", 8, "8 x h100", 8),
        ("nvidia-h100-80gb", 1, "1 x h100", 1),
        ("NVIDIA H100 80GB HBM3", 4, "4 x h100", 4),
        ("A100", 8, "8 x a100", 8),
        ("A100-SXM4-40GB", 8, "8 x a100-40gb", 8),
        ("gb200-nvl72", 144, "144 x gb200", 144),
        ("B200", 8, "8 x b200", 8),
    ],
)
def test_a_device_by_the_name_that_its_users_give_it(device, devices, name, count):
    target = target_of(None, devices, device, None)
    assert (target.name, target.count) == (name, count)


def test_a_topology_takes_the_same_names():
    assert target_of("v5p-128", None, None, None) == target_of("V5P:4x4x4", None, None, None)
    assert target_of(None, None, "v6e-16", None, slices=2).count == 32


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ((None, None, "v5p-100", None), "there is no v5p slice of 50 chips; nearest: v5p-64 (32 chips) and v5p-128 (64 chips)"),
        ((None, None, "v5p-7", None), "counts TensorCores, 2 on a chip, and 7 is odd; use for example v5p-8"),
        ((None, None, "v6e-512", None), "there is no v6e slice of 512 chips; nearest: v6e-256 (256 chips)"),
        ((None, 128, "v5p-128", None), "devices = 128, but device=v5p-128 is 64 devices as JAX shows them, v5p:4x4x4"),
        ((None, 16, "8xh100", None), "devices = 16, but device=8xh100 is 8 of them"),
        ((None, None, "trillium", None), "device = 'trillium' has no size: name the slice, for example device=v6e-256"),
        ((None, None, "h200", None), "device=h200: how many? Give devices=64 beside it"),
        ((None, 3, "tpu7x", None), "a tpu7x chip has 2 devices; give a multiple of that"),
        ((None, 128, "gb200", None), "devices_per_host = 72; to use only 64 of each, give devices_per_host=64"),
        ((None, None, "v5p-128", 4), "devices_per_host = 4 is for GPUs"),
        ((None, None, "h100:2x2", None), "a GPU has no shape; give device=h100 devices=4"),
        ((None, 8, "h10", None), "did you mean 'h100'?"),
        ((None, 8, "mi300x", None), "use one of a100, a100-40gb, h100, h200, b200, gb200, or a TPU slice of v4"),
        (("h200", None, None, None), "topology = 'h200' is a GPU: give device=h200 devices=64"),
        ((None, 64, None, None), "which devices is the plan for? Give device=v5p-128"),
        ((None, None, "0xh100", None), "must name one device at least"),
    ],
)  # fmt: skip
def test_a_name_that_says_too_little_or_too_much(arguments, words):
    with pytest.raises(ValueError) as refused:
        target_of(*arguments)
    assert words in str(refused.value), refused.value


def test_every_name_means_a_device_and_every_gpu_can_be_compiled_for():
    assert set(NAMES.values()) == set(CHIPS)
    assert set(GPUS) == {name for name, chip in CHIPS.items() if chip.platform == "gpu"}
    assert CHIPS["gb200"].flops == 2500e12 and CHIPS["a100-40gb"].flops == CHIPS["a100"].flops == 312e12
