"""Weights in and out: files in the families' published naming give the model that they describe, on every mesh, and back."""

import dataclasses
import io
import json
import shutil
import subprocess
import sys
from pathlib import Path

import decoder_loop
import isolation
import jax
import ml_dtypes
import numpy as np
import published_loop as published
import pytest
from safetensors.numpy import load_file, save_file

from ejdist.mesh import make_mesh
from ejdist.models.decoder import DecoderConfig, token_losses
from ejdist.models.model import StepContext
from ejdist.operations import bind_ops
from ejdist.training.program import make_program
from ejdist.training.runs import nested, section_of, unnested
from ejdist.training.start import open_source
from ejdist.weights.families import FAMILIES, family_of, read_config
from ejdist.weights.files import INDEX, SINGLE, Stored, WeightsError, digest_of, read_folder
from ejdist.weights.match import differences, overrides
from ejdist.weights.reader import _cut
from ejdist.weights.tensors import Piece, Rules, declared_leaves, expand, rule
from ejdist.weights.writer import save
from kernels.ops.rotary_embedding.contract import frequencies
from recipes.schema import Recipe, compose

ROOT = Path(__file__).resolve().parent.parent


def write(folder, config, state, dtype=np.float32):
    """Writes a folder as others do: two files and an index, by the library of the format."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config))
    state = {k: v.astype(dtype) for k, v in state.items()}
    names, files = sorted(state), {}
    for i, part in enumerate((names[::2], names[1::2])):
        file = f"model-{i + 1:05}-of-00002.safetensors"
        save_file({k: state[k] for k in part}, folder / file, {"format": "pt"})
        files |= dict.fromkeys(part, file)
    (folder / INDEX).write_text(json.dumps({"metadata": {}, "weight_map": files}))


def made(folder, name="llama", **keys):
    config = published.MODELS[name] | keys
    state = published.tensors(config)
    write(folder, config, state)
    return config, state


def loaded(folder, c=None):
    c = read_config(folder)[1] if c is None else c
    here = jax.sharding.SingleDeviceSharding(jax.devices()[0])
    like = {n: jax.ShapeDtypeStruct(p.shape, p.dtype, sharding=here) for n, p in declared_leaves(c).items()}
    return c, {n: np.asarray(x) for n, x in open_source(str(folder), c).load(like).items()}


def batch_of(rows=2, length=7):
    tokens = np.random.default_rng(1).integers(0, published.V, (rows, length))
    targets = np.concatenate([tokens[:, 1:], np.full((rows, 1), -1)], 1)
    positions = np.tile(np.arange(length), (rows, 1))
    return {"tokens": tokens, "targets": targets, "positions": positions, "segment_ids": np.zeros_like(tokens)}


def state_in(folder):
    return {k: v for file in sorted(folder.glob("*.safetensors")) for k, v in load_file(file).items()}


# -- the numbers ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", published.MODELS)
def test_a_model_is_what_its_files_say_and_is_written_as_it_was_read(name, tmp_path):
    config, state = made(tmp_path / "theirs", name)
    c, leaves = loaded(tmp_path / "theirs")
    batch, tree = batch_of(), nested({n: x.astype(np.float64) for n, x in leaves.items()})
    found, _ = decoder_loop.forward(tree["params"], tree.get("buffers", {}), batch, c)
    assert found / np.sum(batch["targets"] >= 0) == pytest.approx(published.loss(config, state, batch), rel=1e-6)
    architecture = save(tmp_path / "ours", c, leaves.__getitem__, most=5000)
    written = state_in(tmp_path / "ours")
    assert set(written) == set(state)
    assert all(np.array_equal(written[k], state[k]) and written[k].dtype == np.float32 for k in state)
    assert architecture == config["architectures"][0]
    family, again = read_config(tmp_path / "ours")
    assert family is FAMILIES[architecture] and not differences(c, again)
    files = sorted(p.name for p in (tmp_path / "ours").glob("*.safetensors"))
    assert len(files) > 1 and files[0] == f"model-00001-of-{len(files):05}.safetensors"
    assert json.loads((tmp_path / "ours" / INDEX).read_text())["metadata"]["total_size"] == sum(
        v.nbytes for v in state.values()
    )


@pytest.mark.parametrize(
    "name", ["qwen3_next", *(pytest.param(n, marks=pytest.mark.slow) for n in ("kimi", "nemotron_h"))]
)
def test_a_hybrid_computes_what_its_files_say(name, tmp_path):
    """The model itself, in float32, not only the loop that it is held against: recurrences, gates and experts together."""
    config, state = made(tmp_path, name)
    c, leaves = loaded(tmp_path)
    batch, tree = batch_of(), nested(leaves)
    arrays = {k: jax.numpy.asarray(v, np.int32) for k, v in batch.items()}
    at = StepContext(buffers=tree.get("buffers", {}))
    losses = jax.jit(lambda params: token_losses(params, arrays, c, bind_ops(None), context=at))(tree["params"])
    found = np.sum(np.float64(losses)) / np.sum(batch["targets"] >= 0)
    assert found == pytest.approx(published.loss(config, state, batch), rel=1e-5)


MESHES = {
    "deepseek": ["mesh.fsdp=2", "mesh.ep=2", "mesh.sp=2"],
    "gpt_oss": ["mesh.tp=2", "mesh.ep=2", "mesh.sp=1"],
    "qwen2": ["mesh.fsdp=3", "mesh.tp=2", "mesh.sp=1"],
    "qwen3_next": ["mesh.fsdp=2", "mesh.tp=2", "mesh.sp=1"],
    "kimi": ["mesh.fsdp=2", "mesh.ep=2", "mesh.sp=1"],
    "nemotron_h": ["mesh.fsdp=2", "mesh.tp=2", "mesh.sp=1"],
}
QUICK = ("qwen3_next",)  # dims that are put together over tp


@pytest.mark.parametrize("name", [pytest.param(n, marks=[pytest.mark.slow] * (n not in QUICK)) for n in MESHES])
def test_every_device_of_a_mesh_is_given_what_it_holds_bit_for_bit(name, tmp_path):
    made(tmp_path, name)
    c, whole = loaded(tmp_path)
    sizes = [*MESHES[name], "data.global_batch=12", "data.sequence_length=32", "sequence.order=contiguous"]
    sections = compose(["recipe=short_context", *sizes])
    sections.model = c
    devices = jax.devices()[: np.prod([max(1, n) for n in vars(sections.mesh).values()])]
    state = make_program(sections, make_mesh(**vars(sections.mesh), devices=devices)).state
    like = {f"params.{n}": x for n, x in unnested(state.params).items()} | {
        f"buffers.{n}": x for n, x in unnested(state.buffers).items()
    }
    like = {n: x for n, x in like.items() if n in whole}
    found = open_source(str(tmp_path), c).load(like)
    assert set(found) == set(whole)
    assert any(x.sharding.shard_shape(x.shape) != x.shape for x in found.values())
    for leaf, x in found.items():
        assert x.sharding == like[leaf].sharding and x.dtype == np.float32
        np.testing.assert_array_equal(np.asarray(x), whole[leaf], err_msg=leaf)
        for shard in x.addressable_shards:  # a replicated one too is read once for each device
            np.testing.assert_array_equal(shard.data, whole[leaf][shard.index], err_msg=leaf)


@pytest.mark.parametrize(("start", "stop"), [(0, 8), (0, 2), (2, 5), (3, 4), (4, 8), (5, 8)])
def test_a_run_of_entries_is_put_where_a_shard_has_it(start, stop):
    """Entries 2 to 4 of a dim of eight, whatever part of it a device holds."""
    array, piece = np.arange(30).reshape(3, 10), Piece("leaf", (1, (2, 5), None), (0, 1))
    found = _cut(array, piece, ((1, 2), (start, stop), (4, 9)))
    leaf, shard = np.full((2, 8, 10), -1), np.full((1, stop - start, 5), -1)
    leaf[piece.index] = array
    if found is not None:
        part, at = found
        shard[tuple(slice(i, i + n) for i, n in zip(at, part.shape, strict=True))] = part
    np.testing.assert_array_equal(shard, leaf[1:2, start:stop, 4:9])
    assert (found is None) == (max(start, 2) >= min(stop, 5))


@pytest.mark.parametrize("dtype", [ml_dtypes.bfloat16, np.float16])
def test_narrow_files_are_widened_and_written_back_without_a_change(dtype, tmp_path):
    config, state = published.MODELS["deepseek"], published.tensors(published.MODELS["deepseek"])
    state = {k: v.astype(ml_dtypes.bfloat16 if dtype != np.float16 else dtype) for k, v in state.items()}
    write(tmp_path / "theirs", config, state, dtype)
    c, leaves = loaded(tmp_path / "theirs")
    save(tmp_path / "wide", c, leaves.__getitem__)
    for k, v in state_in(tmp_path / "wide").items():
        np.testing.assert_array_equal(v, state[k].astype(np.float32), err_msg=k)
    if dtype != np.float16:
        save(tmp_path / "narrow", c, leaves.__getitem__, dtype="bfloat16")
        written = state_in(tmp_path / "narrow")
        assert {str(v.dtype) for k, v in written.items() if "correction" not in k} == {"bfloat16"}
        assert all(v.dtype == np.float32 for k, v in written.items() if "correction" in k)
        assert all(np.array_equal(written[k].astype(np.float32), state[k].astype(np.float32)) for k in state)
        assert json.loads((tmp_path / "narrow" / "config.json").read_text())["torch_dtype"] == "bfloat16"


def test_what_is_rounded_goes_to_the_nearest(tmp_path):
    made(tmp_path / "theirs")
    c, leaves = loaded(tmp_path / "theirs")
    save(tmp_path / "ours", c, leaves.__getitem__, dtype="bfloat16")
    for k, v in state_in(tmp_path / "ours").items():
        wide = published.tensors(published.MODELS["llama"])[k]
        assert np.all(np.abs(v.astype(np.float32) - wide) <= 2.0**-8 * np.abs(wide)), k


@pytest.mark.parametrize("name", ["mixtral", "qwen3_moe", "deepseek", "qwen3_next"])
def test_experts_that_are_one_tensor_are_read_too(name, tmp_path):
    config, state = made(tmp_path / "apart", name)
    gate, up, down = ("w1", "w3", "w2") if name == "mixtral" else ("gate_proj", "up_proj", "down_proj")
    fused = {k.replace("block_sparse_moe", "mlp"): v for k, v in state.items() if ".experts." not in k}
    root = "block_sparse_moe" if name == "mixtral" else "mlp"
    for i in range(published.L):
        start = f"model.layers.{i}.{root}.experts."
        if f"{start}0.{gate}.weight" in state:
            each = [[state[f"{start}{e}.{n}.weight"] for e in range(published.E)] for n in (gate, up, down)]
            both = np.concatenate([np.stack(each[0]), np.stack(each[1])], 1)
            fused[f"model.layers.{i}.mlp.experts.gate_up_proj"] = both
            fused[f"model.layers.{i}.mlp.experts.down_proj"] = np.stack(each[2])
    write(tmp_path / "fused", config, fused)
    (_, one), (_, other) = loaded(tmp_path / "apart"), loaded(tmp_path / "fused")
    assert set(one) == set(other) and all(np.array_equal(one[k], other[k]) for k in one)


@pytest.mark.parametrize(("count", "looks"), [(1, 1), (999, 999), (1000, 1000), (1001, 501), (1999, 1000), (2001, 667)])
def test_a_digest_looks_into_at_most_a_thousand_tensors(count, looks, monkeypatch):
    class File(io.BytesIO):
        read_from = 0

        def open(self, mode):
            File.read_from += 1
            return io.BytesIO(bytes(8))

    tensors = {f"{i:04}": Stored(File(), "F32", (2,), 0) for i in range(count)}
    assert digest_of(tensors) == digest_of(dict(reversed(tensors.items()))) and File.read_from == 2 * looks


@pytest.mark.slow
def test_the_memory_of_an_import_does_not_grow_with_the_model(tmp_path):
    """Parameters are stacked, so one of them is 128 MiB here, and all are 513; a tensor of the files is 2 MiB."""
    if not Path("/proc/self/clear_refs").exists():
        pytest.skip("the peak of resident memory is read from Linux's /proc")
    command = [sys.executable, str(ROOT / "tests" / "import_memory.py"), str(tmp_path), "32"]
    environment = {"PATH": "/usr/bin:/bin"} | isolation.watched()
    done = subprocess.run(command, capture_output=True, text=True, env=environment)
    assert done.returncode == 0, done.stderr
    row = json.loads(done.stdout)
    assert row["largest_parameter_MiB"] == 128 and row["parameters_MiB"] > 512 and row["grown_MiB"] > 512
    assert row["beyond_MiB"] < 24, row
    # What is left is the parameters and what was compiled: the pages of 256 MiB of files are not.
    assert row["grown_MiB"] < row["parameters_MiB"] + 128, row
    shutil.rmtree(tmp_path / "32")


# -- config.json ----------------------------------------------------------------------------------------------------------

# What is published beside the weights, without what says nothing of the model's function.
META = {"bos_token_id": 0, "eos_token_id": [1, 2], "torch_dtype": "bfloat16", "transformers_version": "4.43.0",
        "use_cache": True, "attention_dropout": 0.0, "initializer_range": 0.02}  # fmt: skip
LLAMA_31 = {"architectures": ["LlamaForCausalLM"], "model_type": "llama", "attention_bias": False, "hidden_act": "silu",
            "mlp_bias": False, "pretraining_tp": 1, "rms_norm_eps": 1e-05, "rope_theta": 500000.0, "vocab_size": 128256,
            "max_position_embeddings": 131072, "num_key_value_heads": 8, "tie_word_embeddings": False,
            "rope_scaling": {"factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
                             "original_max_position_embeddings": 8192, "rope_type": "llama3"}}  # fmt: skip
QWEN3 = {"architectures": ["Qwen3ForCausalLM"], "model_type": "qwen3", "attention_bias": False, "head_dim": 128,
         "hidden_act": "silu", "max_position_embeddings": 40960, "rms_norm_eps": 1e-06, "rope_scaling": None,
         "rope_theta": 1000000, "sliding_window": None, "tie_word_embeddings": False, "use_sliding_window": False,
         "vocab_size": 151936}  # fmt: skip
QWEN3_MOE = QWEN3 | {"architectures": ["Qwen3MoeForCausalLM"], "model_type": "qwen3_moe", "decoder_sparse_step": 1,
                     "mlp_only_layers": [], "norm_topk_prob": True, "num_experts": 128, "num_experts_per_tok": 8,
                     "num_key_value_heads": 4, "output_router_logits": False, "router_aux_loss_coef": 0.001}  # fmt: skip
CONFIGS = {
    "8b": LLAMA_31 | {"hidden_size": 4096, "intermediate_size": 14336, "num_attention_heads": 32, "num_hidden_layers": 32},
    "70b": LLAMA_31 | {"hidden_size": 8192, "intermediate_size": 28672, "num_attention_heads": 64, "num_hidden_layers": 80},
    "1b": LLAMA_31 | {"hidden_size": 2048, "intermediate_size": 8192, "num_attention_heads": 32, "num_hidden_layers": 16,
                      "head_dim": 64, "tie_word_embeddings": True,
                      "rope_scaling": LLAMA_31["rope_scaling"] | {"factor": 32.0}},
    "qwen3_8b": QWEN3 | {"hidden_size": 4096, "intermediate_size": 12288, "max_window_layers": 36, "num_attention_heads": 32,
                         "num_hidden_layers": 36, "num_key_value_heads": 8},
    "qwen3_30b_a3b": QWEN3_MOE | {"hidden_size": 2048, "intermediate_size": 6144, "max_window_layers": 48,
                                  "moe_intermediate_size": 768, "num_attention_heads": 32, "num_hidden_layers": 48},
    "qwen3_235b_a22b": QWEN3_MOE | {"hidden_size": 4096, "intermediate_size": 12288, "max_window_layers": 94,
                                    "moe_intermediate_size": 1536, "num_attention_heads": 64, "num_hidden_layers": 94},
    "mixtral_8x7b": {"architectures": ["MixtralForCausalLM"], "model_type": "mixtral", "hidden_act": "silu",
                     "hidden_size": 4096, "intermediate_size": 14336, "max_position_embeddings": 32768,
                     "num_attention_heads": 32, "num_experts_per_tok": 2, "num_hidden_layers": 32, "num_key_value_heads": 8,
                     "num_local_experts": 8, "output_router_logits": False, "rms_norm_eps": 1e-05, "rope_theta": 1000000.0,
                     "router_aux_loss_coef": 0.02, "sliding_window": None, "tie_word_embeddings": False,
                     "vocab_size": 32000},
    # Without its quantization, and without YaRN, which the recipe leaves to the past-4096 tokens.
    "deepseek_v3": {"architectures": ["DeepseekV3ForCausalLM"], "model_type": "deepseek_v3", "attention_bias": False,
                    "auto_map": {}, "aux_loss_alpha": 0.001, "ep_size": 1, "first_k_dense_replace": 3, "hidden_act": "silu",
                    "hidden_size": 7168, "intermediate_size": 18432, "kv_lora_rank": 512, "max_position_embeddings": 163840,
                    "moe_intermediate_size": 2048, "moe_layer_freq": 1, "n_group": 8, "n_routed_experts": 256,
                    "n_shared_experts": 1, "norm_topk_prob": True, "num_attention_heads": 128, "num_experts_per_tok": 8,
                    "num_hidden_layers": 61, "num_key_value_heads": 128, "num_nextn_predict_layers": 1, "pretraining_tp": 1,
                    "q_lora_rank": 1536, "qk_nope_head_dim": 128, "qk_rope_head_dim": 64, "rms_norm_eps": 1e-06,
                    "rope_theta": 10000, "routed_scaling_factor": 2.5, "scoring_func": "sigmoid", "seq_aux": True,
                    "tie_word_embeddings": False, "topk_group": 4, "topk_method": "noaux_tc", "v_head_dim": 128,
                    "vocab_size": 129280},
    "gpt_oss_20b": {"architectures": ["GptOssForCausalLM"], "model_type": "gpt_oss", "attention_bias": True,
                    "experts_per_token": 4, "head_dim": 64, "hidden_act": "silu", "hidden_size": 2880,
                    "initial_context_length": 4096, "intermediate_size": 2880,
                    "layer_types": ["sliding_attention", "full_attention"] * 12, "max_position_embeddings": 131072,
                    "num_attention_heads": 64, "num_experts_per_tok": 4, "num_hidden_layers": 24, "num_key_value_heads": 8,
                    "num_local_experts": 32, "output_router_logits": False, "rms_norm_eps": 1e-05,
                    "rope_scaling": {"beta_fast": 32.0, "beta_slow": 1.0, "factor": 32.0,
                                     "original_max_position_embeddings": 4096, "rope_type": "yarn", "truncate": False},
                    "rope_theta": 150000, "router_aux_loss_coef": 0.9, "sliding_window": 128, "swiglu_limit": 7.0,
                    "tie_word_embeddings": False, "vocab_size": 201088},
    "kimi_linear_48b_a3b": {"architectures": ["KimiLinearForCausalLM"], "model_type": "kimi_linear", "auto_map": {},
                            "first_k_dense_replace": 1, "head_dim": 72, "hidden_act": "silu", "hidden_size": 2304,
                            "intermediate_size": 9216, "kv_lora_rank": 512, "linear_attn_config": {
                                "full_attn_layers": [4, 8, 12, 16, 20, 24, 27], "head_dim": 128, "num_heads": 32,
                                "kda_layers": [i for i in range(1, 27) if i % 4], "short_conv_kernel_size": 4},
                            "mla_use_nope": True, "model_max_length": 1048576, "moe_intermediate_size": 1024,
                            "moe_layer_freq": 1, "moe_renormalize": True, "moe_router_activation_func": "sigmoid",
                            "num_attention_heads": 32, "num_expert_group": 1, "num_experts": 256,
                            "num_experts_per_token": 8, "num_hidden_layers": 27, "num_key_value_heads": 32,
                            "num_nextn_predict_layers": 0, "num_shared_experts": 1, "q_lora_rank": None,
                            "qk_nope_head_dim": 128, "qk_rope_head_dim": 64, "rms_norm_eps": 1e-05, "rope_scaling": None,
                            "rope_theta": 10000.0, "routed_scaling_factor": 2.446, "tie_word_embeddings": False,
                            "topk_group": 1, "use_grouped_topk": True, "v_head_dim": 128, "vocab_size": 163840},
    # As published; YaRN, for rows past 262,144 tokens, is left to a run.
    "qwen3_next_80b_a3b": {"architectures": ["Qwen3NextForCausalLM"], "model_type": "qwen3_next", "attention_bias": False,
                           "decoder_sparse_step": 1, "full_attention_interval": 4, "head_dim": 256, "hidden_act": "silu",
                           "hidden_size": 2048, "intermediate_size": 5120, "linear_conv_kernel_dim": 4,
                           "linear_key_head_dim": 128, "linear_num_key_heads": 16, "linear_num_value_heads": 32,
                           "linear_value_head_dim": 128, "max_position_embeddings": 262144, "mlp_only_layers": [],
                           "moe_intermediate_size": 512, "norm_topk_prob": True, "num_attention_heads": 16,
                           "num_experts": 512, "num_experts_per_tok": 10, "num_hidden_layers": 48,
                           "num_key_value_heads": 2, "output_router_logits": False, "partial_rotary_factor": 0.25,
                           "rms_norm_eps": 1e-06, "rope_scaling": None, "rope_theta": 10000000,
                           "router_aux_loss_coef": 0.001, "shared_expert_intermediate_size": 512,
                           "tie_word_embeddings": False, "use_sliding_window": False, "vocab_size": 151936},
    "nemotron_h_8b": {"architectures": ["NemotronHForCausalLM"], "model_type": "nemotron_h", "attention_bias": False,
                      "attention_head_dim": 128, "auto_map": {}, "chunk_size": 128, "conv_kernel": 4, "expand": 2,
                      "hidden_dropout": 0.0, "hidden_size": 4096,
                      "hybrid_override_pattern": "M-M-M-M*-M-M-M-M-M*-M-M-M-M-M*-M-M-M-M-M*-M-M-M-M-M-",
                      "intermediate_size": 21504, "layer_norm_epsilon": 1e-05, "mamba_head_dim": 64,
                      "mamba_hidden_act": "silu", "mamba_num_heads": 128, "mamba_proj_bias": False,
                      "max_position_embeddings": 8192, "mlp_bias": False, "mlp_hidden_act": "relu2", "n_groups": 8,
                      "num_attention_heads": 32, "num_hidden_layers": 52, "num_key_value_heads": 8, "num_logits_to_keep": 1,
                      "rescale_prenorm_residual": True, "residual_in_fp32": False, "rms_norm_eps": 1e-05,
                      "sliding_window": None, "ssm_state_size": 128, "tie_word_embeddings": False, "time_step_floor": 0.0001,
                      "time_step_max": 0.1, "time_step_min": 0.001, "time_step_rank": 256, "use_bias": False,
                      "use_conv_bias": True, "use_mamba_kernels": True, "vocab_size": 131072},
}  # fmt: skip


@pytest.mark.parametrize("name", CONFIGS)
def test_published_configs_are_the_recipes(name, tmp_path):
    """And of these, each is written as its own family."""
    (tmp_path / "config.json").write_text(json.dumps(META | CONFIGS[name]))
    family, section = read_config(tmp_path)
    recipe = compose([f"model={name}"]).model
    assert differences(recipe, section) == []
    assert family_of(recipe)[1] is family
    # The kinds are found again from the list of layers, and the overrides make the model of any other recipe this one.
    layers = ("first_layers", "layer_pattern", "last_layers")
    assert [getattr(section, key) for key in layers] == [getattr(recipe, key) for key in layers]
    lines = overrides(section, compose(["model=nano"]).model)
    assert differences(compose(["model=nano", *lines]).model, section) == []
    names = {t.name for t in expand(family.rules[0], section)} if section.num_layers < 60 else set()
    last = "mixer.down_proj.weight" if section.layers()[-1] == ("ungated_mlp",) else "self_attn.o_proj.weight"
    assert section.num_layers >= 60 or any(n.endswith(f".layers.{section.num_layers - 1}.{last}") for n in names)


def test_yarn_of_deepseek_is_in_the_scale_of_the_logits(tmp_path):
    scaling = {"beta_fast": 32, "beta_slow": 1, "factor": 40, "mscale": 1.0, "mscale_all_dim": 1.0,
               "original_max_position_embeddings": 4096, "type": "yarn"}  # fmt: skip
    (tmp_path / "config.json").write_text(json.dumps(CONFIGS["deepseek_v3"] | {"rope_scaling": scaling}))
    section = read_config(tmp_path)[1]
    assert (section.rope_attention_factor, section.rope_original_length, section.rope_factor) == (1.0, 4096, 40.0)
    assert section.attention_scale == pytest.approx(0.13523, abs=5e-6)
    assert FAMILIES["DeepseekV3ForCausalLM"].config(section)["rope_scaling"]["mscale_all_dim"] == pytest.approx(1.0)
    assert family_of(section)[0] == "DeepseekV3ForCausalLM"


@pytest.mark.parametrize("name", ["nano", "deepseek_v3"])
def test_ntk_scaling_is_another_base_and_written_as_that(name):
    c = compose([f"model={name}", "model.rope_scaling=ntk", "model.rope_factor=4.0"]).model
    width = c.head_dim if name == "nano" else c.latent.rope_dim
    theta = family_of(c)[1].config(c)["rope_theta"]
    np.testing.assert_allclose(
        frequencies(width, theta, None)[0], frequencies(width, c.rope_base, c.scaling())[0], rtol=1e-12
    )
    assert not differences(c, dataclasses.replace(c, rope_scaling=None, rope_factor=1.0, rope_base=theta))
    assert differences(c, dataclasses.replace(c, rope_scaling=None, rope_factor=1.0)) == ["rope_base"]


@pytest.mark.parametrize(
    ("keys", "kinds"),
    [
        ({"layer_types": None}, "gated_delta+experts full+experts gated_delta+experts"),
        ({"layer_types": None, "full_attention_interval": None}, "gated_delta+experts gated_delta+experts gated_delta+experts"),
        ({"layer_types": None, "full_attention_interval": 3, "decoder_sparse_step": 2},
         "gated_delta+mlp gated_delta+experts full+mlp"),
        ({"mlp_only_layers": [0, 1, 2]}, "gated_delta+mlp full+mlp gated_delta+mlp"),
        ({"layer_types": ["full_attention"] * 3, "mlp_only_layers": [2]}, "full+experts full+experts full+mlp"),
    ],
)  # fmt: skip
def test_which_layers_of_qwen3_next_are_what(keys, kinds, tmp_path):
    """And a model of layers of one kind alone is written and read again, too."""
    (tmp_path / "config.json").write_text(json.dumps(published.MODELS["qwen3_next"] | keys))
    family, c = read_config(tmp_path)
    assert " ".join(c.kinds()) == kinds and family_of(c) == ("Qwen3NextForCausalLM", family)
    assert family.config(c)["layer_types"] == [
        "full_attention" if "full" in kind else "linear_attention" for kind in c.kinds()
    ]


@pytest.mark.parametrize(("width", "turned"), [(44, 30), (256, 64), (8, 8)])
def test_the_share_of_a_head_that_turns_is_written_so_that_as_many_entries_turn(width, turned):
    """Readers cut off the fraction of the product, of which 44 times 30 / 44 has one."""
    c = compose(["model=qwen3_next_80b_a3b", f"model.head_dim={width}", f"model.rotary_dim={turned}"]).model
    assert int(width * family_of(c)[1].config(c)["partial_rotary_factor"]) == turned


REFUSED = [
    ("llama", {"architectures": ["FalconForCausalLM"]}, ["FalconForCausalLM", "not supported", "LlamaForCausalLM"]),
    ("llama", {"architectures": None, "model_type": None}, ["not supported"]),
    ("llama", {"hidden_size": None}, ["has no hidden_size"]),
    ("llama", {"mlp_bias": True}, ["mlp_bias = True", "False"]),
    ("llama", {"hidden_act": "relu2"}, ["hidden_act = 'relu2'", "gelu_pytorch_tanh"]),
    ("llama", {"attention_dropout": 0.1}, ["attention_dropout = 0.1"]),
    ("llama", {"clip_qkv": 8.0}, ["clip_qkv = 8.0", "not known here", "take the key out"]),
    ("llama", {"num_key_value_heads": 3}, ["does not describe a valid model", "model.num_kv_heads = 3"]),
    ("mixtral", {"num_experts_per_tok": 99}, ["does not describe a valid model", "model.experts.top_k = 99"]),
    ("llama", {"quantization_config": {"quant_method": "fp8"}}, ["quantization_config", "dequantize"]),
    ("llama", {"rope_scaling": {"rope_type": "longrope", "factor": 2.0}}, ["rope_type = 'longrope'", "llama3 or yarn"]),
    ("llama", {"rope_scaling": {"rope_type": "dynamic", "factor": 2.0}}, ["rope_type = 'dynamic'"]),
    ("llama", {"rope_scaling": {"rope_type": "linear"}}, ["has no factor"]),
    ("llama", {"rope_scaling": published.LLAMA3 | {"low_freq_factor": 8.0}},
     ["does not describe a valid model", "low is model.rope_low"]),
    ("llama", {"rope_scaling": published.YARN | {"short_factor": [1.0]}}, ["short_factor"]),
    ("llama", {"partial_rotary_factor": 0.5}, ["partial_rotary_factor = 0.5"]),
    ("qwen2", {"layer_types": ["full_attention"]}, ["layer_types", "1 layers, not 3"]),
    ("gpt_oss", {"layer_types": ["chunked_attention"] * 3}, ["'chunked_attention'"]),
    ("gpt_oss", {"swiglu_limit": 5.0}, ["swiglu_limit = 5.0"]),
    ("deepseek", {"rope_interleave": False}, ["rope_interleave = False"]),
    ("deepseek", {"topk_method": "greedy"}, ["topk_method = 'greedy'", "noaux_tc"]),
    ("deepseek", {"scoring_func": "softmax"}, ["scoring_func"]),
    ("mixtral", {"router_jitter_noise": 0.1}, ["router_jitter_noise"]),
    ("qwen3_next", {"attention_bias": True}, ["attention_bias = True"]),
    ("qwen3_next", {"use_sliding_window": True}, ["use_sliding_window = True"]),
    ("qwen3_next", {"hidden_act": "gelu"}, ["hidden_act = 'gelu'", "'silu'"]),
    ("qwen3_next", {"layer_types": ["linear_attention", "sliding_attention", "full_attention"]}, ["'sliding_attention'"]),
    ("qwen3_next", {"layer_types": ["linear_attention"]}, ["layer_types", "1 layers, not 3"]),
    ("qwen3_next", {"linear_num_value_heads": 6}, ["does not describe a valid model", "num_value_heads = 6 must be"]),
    ("qwen3_next", {"linear_conv_kernel_dim": None}, ["has no linear_conv_kernel_dim"]),
    ("qwen3_next", {"partial_rotary_factor": 1.5}, ["does not describe a valid model", "model.rotary_dim = 12"]),
    ("qwen3_next", {"partial_rotary_factor": 0.4}, ["does not describe a valid model", "model.rotary_dim = 3"]),
    ("qwen3_next", {"rope_scaling": {"rope_type": "longrope", "factor": 2.0}}, ["rope_type = 'longrope'"]),
    ("qwen3_next", {"rope_scaling": {"rope_type": "default", "mrope_section": [11, 11, 10]}}, ["mrope_section"]),
    ("qwen3_next", {"decoder_sparse_step": 0}, ["decoder_sparse_step = 0", "is not a positive integer"]),
    ("qwen3_next", {"mlp_only_layers": 1}, ["mlp_only_layers = 1", "is not a list of integers"]),
    ("qwen3_next", {"num_experts": 0}, ["num_experts = 0", "is not a positive integer"]),
    ("qwen3_next", {"attn_output_gate": True}, ["attn_output_gate", "not known here"]),
    ("kimi", {"linear_attn_config": {"kda_layers": [1, 2], "full_attn_layers": [2, 3]}}, ["each layer from 1 to 3 once"]),
    ("kimi", {"linear_attn_config": None}, ["has no linear_attn_config"]),
    ("kimi", {"linear_attn_config": published.kimi(1, 2)["linear_attn_config"] | {"gate_lower_bound": -5.0}},
     ["gate_lower_bound = -5.0", "not known here"]),
    ("kimi", {"q_lora_rank": 8}, ["q_lora_rank = 8"]),
    ("kimi", {"mla_use_nope": False}, ["mla_use_nope = False", "True"]),
    ("kimi", {"num_expert_group": 2}, ["num_expert_group = 2"]),
    ("kimi", {"moe_router_activation_func": "softmax"}, ["moe_router_activation_func = 'softmax'", "'sigmoid'"]),
    ("kimi", {"num_key_value_heads": 2}, ["num_key_value_heads = 2"]),
    ("kimi", {"num_experts_per_token": 0}, ["num_experts_per_token = 0", "is not a positive integer"]),
    ("kimi", {"rope_scaling": published.YARN}, ["does not describe a valid model", "model.latent.rope = false"]),
    ("kimi", {"hidden_act": "gelu"}, ["hidden_act = 'gelu'", "'silu'"]),
    ("nemotron_h", {"hybrid_override_pattern": "ME*M-"}, ["hybrid_override_pattern has 'E'", "experts without a gate"]),
    ("nemotron_h", {"hybrid_override_pattern": "M-*M"}, ["hybrid_override_pattern is of 4 layers, not 5"]),
    ("nemotron_h", {"hybrid_override_pattern": "", "num_hidden_layers": None}, ["is of 0 layers"]),
    ("nemotron_h", {"hybrid_override_pattern": None}, ["has no hybrid_override_pattern"]),
    ("nemotron_h", {"layers_block_type": ["mlp", "moe"]}, ["layers_block_type has 'moe'", "full_attention, mlp"]),
    ("nemotron_h", {"mlp_hidden_act": "tanh"}, ["mlp_hidden_act = 'tanh'", "gelu_pytorch_tanh, relu, relu2"]),
    ("nemotron_h", {"mamba_hidden_act": "gelu"}, ["mamba_hidden_act = 'gelu'", "'silu'"]),
    ("nemotron_h", {"attention_bias": True}, ["attention_bias = True"]),
    ("nemotron_h", {"mlp_bias": True}, ["mlp_bias = True"]),
    ("nemotron_h", {"use_conv_bias": False}, ["use_conv_bias = False"]),
    ("nemotron_h", {"use_bias": True}, ["use_bias = True"]),
    ("nemotron_h", {"tie_word_embeddings": True}, ["tie_word_embeddings = True"]),
    ("nemotron_h", {"sliding_window": 64}, ["sliding_window = 64"]),
    ("nemotron_h", {"time_step_limit": [0.001, 0.1]}, ["time_step_limit = [0.001, 0.1]", "of any size above 0"]),
    ("nemotron_h", {"n_groups": 3}, ["does not describe a valid model", "mamba2.num_heads = 4 must be a multiple"]),
    ("nemotron_h", {"ssm_state_size": None}, ["has no ssm_state_size"]),
    ("mamba2", {"hidden_act": "relu"}, ["hidden_act = 'relu'"]),
    ("mamba2", {"expand": 1}, ["8 heads of 3, 24 numbers", "they are 12"]),
    ("mamba2", {"rms_norm": False}, ["rms_norm = False"]),
    ("mamba2", {"time_step_limit": 1.0}, ["time_step_limit = 1.0"]),
    # Values that no such key has.
    ("llama", {"num_attention_heads": 0}, ["num_attention_heads = 0", "is not a positive integer"]),
    ("llama", {"vocab_size": "x"}, ["vocab_size = 'x'", "is not a positive integer"]),
    ("llama", {"vocab_size": 1.5}, ["vocab_size = 1.5", "is not a positive integer"]),
    ("llama", {"intermediate_size": True}, ["intermediate_size = True", "is not a positive integer"]),
    ("llama", {"hidden_act": []}, ["hidden_act = []", "is not a string"]),
    ("llama", {"architectures": 1.5}, ["architectures = 1.5", "is not a list of strings"]),
    ("llama", {"rope_scaling": "x"}, ["rope_scaling = 'x'", "is not an object"]),
    ("llama", {"rope_theta": "x"}, ["rope_theta = 'x'", "is not a positive number"]),
    ("llama", {"rope_scaling": {"rope_type": "linear", "factor": "2"}}, ["factor = '2'", "is not a positive number"]),
    ("llama", {"attention_bias": "no"}, ["attention_bias = 'no'", "is not true or false"]),
    ("qwen2", {"layer_types": "full_attention"}, ["layer_types = 'full_attention'", "is not a list of strings"]),
    ("deepseek", {"n_shared_experts": -1}, ["n_shared_experts = -1", "is not an integer of at least 0"]),
]  # fmt: skip


@pytest.mark.parametrize(("name", "keys", "words"), REFUSED, ids=lambda x: next(iter(x)) if isinstance(x, dict) else "")
def test_a_config_that_means_another_model_is_refused_by_name(name, keys, words, tmp_path):
    (tmp_path / "config.json").write_text(json.dumps(published.MODELS[name] | keys))
    with pytest.raises(WeightsError) as caught:
        read_config(tmp_path)
    message = str(caught.value)
    assert all(w in message for w in [str(tmp_path), *words]) and "\n" not in message, message


def test_a_mistral_without_the_key_has_the_window_of_the_first_one(tmp_path):
    config = published.MODELS["mistral"]
    for keys, window in (({}, 4096), ({"sliding_window": None}, None), ({"sliding_window": 5}, 5)):
        plain = {k: v for k, v in config.items() if k != "sliding_window"}
        (tmp_path / "config.json").write_text(json.dumps(plain | keys))
        assert read_config(tmp_path)[1].sliding_window == window


UNWRITTEN = [
    ("nano", ["model.attention_soft_cap=30.0"], ["model.attention_soft_cap = 30.0", "Qwen3ForCausalLM"]),
    ("nano", ["model.logits_soft_cap=30.0"], ["model.logits_soft_cap"]),
    ("nano", ["model.attention_scale=0.3"], ["model.attention_scale = 0.3"]),
    ("moe_nano", ["model.experts.shared_dim=8"], ["model.experts.shared_dim = 8"]),
    ("moe_nano", ["model.experts.bias_rate=0.1"], ["model.experts.bias_rate"]),
    ("mixtral_8x7b", ["model.experts.scaling_factor=2.0"], ["model.experts.scaling_factor = 2.0"]),
    ("gpt_oss_20b", ["model.attention_sinks=false"], ["model.attention_sinks = false", "GptOssForCausalLM"]),
    ("deepseek_v3", ["model.experts.shared_dim=100"], ["model.experts.shared_dim = 100"]),
    ("deepseek_v3", ["model.layer_pattern=[latent_experts,latent]"], ["latent_experts"]),
    ("deepseek_v3", ["model.latent.rope=false"], ["model.latent.rope = false"]),
    ("kimi_linear_48b_a3b", ["model.kda.gate_bias=true"], ["model.kda.gate_bias = true", "KimiLinear"]),
    ("kimi_linear_48b_a3b", ["model.kda.rank=64"], ["model.kda.rank = 64", "KimiLinear"]),
    ("kimi_linear_48b_a3b", ["model.latent.norm_eps=null"], ["model.latent.norm_eps = null", "KimiLinear"]),
    ("kimi_linear_48b_a3b", ["model.latent.query_rank=64"], ["model.latent.query_rank = 64", "KimiLinear"]),
    ("qwen3_next_80b_a3b", ["model.zero_centered_norms=false"], ["model.zero_centered_norms = false", "Qwen3Next"]),
    ("qwen3_next_80b_a3b", ["model.experts.shared_gate=false"], ["model.experts.shared_gate = false"]),
    ("qwen3_next_80b_a3b", ["model.attention_gate=false"], ["model.attention_gate = false"]),
    ("nemotron_h_8b", ["model.attention_rope=true"], ["model.attention_rope = true", "NemotronH"]),
    ("nemotron_h_8b", ["model.tie_embeddings=true"], ["cannot be exported", "no family"]),
    ("hybrid_nano", ["model.zero_centered_norms=true"], ["model.attention_gate = false", "Qwen3Next"]),
]  # fmt: skip


@pytest.mark.parametrize(("name", "changes", "words"), UNWRITTEN, ids=lambda x: x[0] if isinstance(x, list) else x)
def test_a_model_of_no_family_is_not_written(name, changes, words, tmp_path):
    c = compose([f"model={name}", *changes]).model
    with pytest.raises(WeightsError) as caught:
        save(tmp_path / "to", c, lambda leaf: pytest.fail("read"))
    assert all(w in str(caught.value) for w in ["cannot be exported", *words]), caught.value
    assert not list(tmp_path.iterdir())


# -- wrong files ----------------------------------------------------------------------------------------------------------


def change(folder, name, how):
    """Writes one tensor anew."""
    file = next(f for f in sorted(folder.glob("*.safetensors")) if name in load_file(f))
    state = load_file(file)
    given = how(state.pop(name))
    save_file(state if given is None else state | {name: given}, file)
    return file


def without_index(folder, name):
    names = json.loads((folder / INDEX).read_text())
    del names["weight_map"][name]
    (folder / INDEX).write_text(json.dumps(names))


def add(folder, name, tensor):
    save_file({name: tensor}, folder / "more.safetensors")
    names = json.loads((folder / INDEX).read_text())
    names["weight_map"][name] = "more.safetensors"
    (folder / INDEX).write_text(json.dumps(names))


def cut(folder, keep):
    file = sorted(folder.glob("*.safetensors"))[0]
    file.write_bytes(file.read_bytes()[:keep])


Q = "model.layers.1.self_attn.q_proj.weight"
DAMAGES = {
    "no_config": (lambda d: (d / "config.json").unlink(), ["neither config.json nor checkpoints"]),
    "config_is_no_json": (lambda d: (d / "config.json").write_text("{"), ["config.json is not JSON"]),
    "config_is_a_list": (lambda d: (d / "config.json").write_text("[]"), ["holds a list"]),
    "no_files": (lambda d: [p.unlink() for p in d.glob("model*")], ["holds no weights", INDEX, SINGLE]),
    "pickles": (
        lambda d: [p.unlink() for p in d.glob("model*")] + [(d / "pytorch_model.bin").write_bytes(b"x")],
        ["pytorch_model.bin is in another format"],
    ),
    "a_file_is_missing": (lambda d: sorted(d.glob("*.safetensors"))[1].unlink(), ["00002-of-00002", "cannot be read"]),
    "cut_off": (lambda d: cut(d, -8), ["00001-of-00002", "is truncated", "tensor"]),
    "cut_in_the_header": (lambda d: cut(d, 100), ["not a complete safetensors file"]),
    "empty": (lambda d: cut(d, 4), ["not a complete safetensors file"]),
    "header_is_no_json": (
        lambda d: sorted(d.glob("*.safetensors"))[0].write_bytes((8).to_bytes(8, "little") + b"nonsense"),
        ["has an unreadable header"],
    ),
    "index_is_no_index": (lambda d: (d / INDEX).write_text("{}"), [INDEX, "has no weight_map"]),
    "index_names_what_is_not_there": (lambda d: change(d, Q, lambda x: None), [INDEX, Q, "does not"]),
    "missing": (lambda d: without_index(d, Q), ["lacks", Q, "copy all"]),
    "unknown": (lambda d: add(d, "model.layers.1.self_attn.q_proj.lora_A", np.ones(3)), ["lora_A", "no parameter"]),
    "shape": (lambda d: change(d, Q, lambda x: x.T.copy()), [Q, "[12, 24]", "[24, 12]"]),
    "float64": (lambda d: change(d, Q, lambda x: x.astype(np.float64)), [Q, "is F64", "F32, BF16, F16"]),
    "int8": (lambda d: change(d, Q, lambda x: x.astype(np.int8)), [Q, "is I8"]),
}  # fmt: skip


@pytest.mark.parametrize("damage", DAMAGES)
def test_files_that_are_not_the_model_are_named(damage, tmp_path):
    made(tmp_path)
    c = read_config(tmp_path)[1]
    spoil, words = DAMAGES[damage]
    spoil(tmp_path)
    with pytest.raises(WeightsError) as caught:
        open_source(str(tmp_path), c)
    message = str(caught.value)
    assert all(w in message for w in [str(tmp_path), *words]) and "\n" not in message, message


@pytest.mark.parametrize(
    ("name", "how", "words"),
    [
        ("conv1d.weight", lambda x: x[:, 0], ["is [64, 3]", "[64, 1, 3]"]),
        ("in_proj_qkvz.weight", lambda x: x[:-1], ["is [103, 12]", "[104, 12]"]),
        ("in_proj_ba.weight", None, ["lacks", "in_proj_ba.weight"]),
    ],
)
def test_tensors_in_blocks_that_are_not_the_model_are_named(name, how, words, tmp_path):
    made(tmp_path, "qwen3_next")
    tensor = f"model.layers.2.linear_attn.{name}"
    without_index(tmp_path, tensor) if how is None else change(tmp_path, tensor, lambda x: how(x).copy())
    with pytest.raises(WeightsError) as caught:
        open_source(str(tmp_path), read_config(tmp_path)[1])
    assert all(w in str(caught.value) for w in [tensor, *words]), caught.value


def test_a_folder_that_is_not_there_is_named(tmp_path):
    with pytest.raises(WeightsError, match="is no folder; give a folder"):
        open_source(str(tmp_path / "none"), DecoderConfig())
    with pytest.raises(ValueError, match=r"model\.num_layers"):
        open_source(str(tmp_path), DecoderConfig(num_layers=0))


def test_what_is_left_out_is_said(tmp_path):
    made(tmp_path)
    add(tmp_path, "model.layers.0.self_attn.rotary_emb.inv_freq", np.ones(3, np.float32))
    c = read_config(tmp_path)[1]
    (note,) = open_source(str(tmp_path), c).notes
    assert "inv_freq" in note and "ignored in" in note
    made(tmp_path / "deepseek", "deepseek")
    add(tmp_path / "deepseek", "model.layers.3.eh_proj.weight", np.ones(3, np.float32))
    (note,) = open_source(str(tmp_path / "deepseek"), read_config(tmp_path / "deepseek")[1]).notes
    assert "model.layers.3.eh_proj.weight" in note and "multi-token prediction" in note
    made(tmp_path / "next", "qwen3_next")
    add(tmp_path / "next", "mtp.layers.0.self_attn.q_proj.weight", np.ones(3, np.float32))
    (note,) = open_source(str(tmp_path / "next"), read_config(tmp_path / "next")[1]).notes
    assert "mtp.layers.0.self_attn.q_proj.weight" in note and "multi-token prediction" in note


def test_a_tied_projection_must_be_the_embedding(tmp_path):
    _, state = made(tmp_path, "llama_tied")
    c = read_config(tmp_path)[1]
    add(tmp_path, "lm_head.weight", state["model.embed_tokens.weight"])
    assert open_source(str(tmp_path), c).notes == []
    changed = state["model.embed_tokens.weight"].copy()
    changed[-1, -1] += 1
    add(tmp_path, "lm_head.weight", changed)
    with pytest.raises(WeightsError, match="tie_word_embeddings to false"):
        open_source(str(tmp_path), c)
    _, state = made(tmp_path / "mamba2", "mamba2")  # whose embedding has another name
    add(tmp_path / "mamba2", "lm_head.weight", state["backbone.embeddings.weight"])
    assert open_source(str(tmp_path / "mamba2"), read_config(tmp_path / "mamba2")[1]).notes == []


@pytest.mark.parametrize(
    ("name", "changes", "words"),
    [
        ("llama", {"num_heads": 2, "num_kv_heads": 1}, ["model.num_heads = 2", "has 4: give model.num_heads=4 (1 more"]),
        ("llama", {"norm_eps": 2e-5}, ["give model.norm_eps=1e-05"]),
        ("llama_tied", {"tie_embeddings": False}, ["model.tie_embeddings = false", "give model.tie_embeddings=true"]),
        ("qwen2", {"layer_pattern": ("window",), "first_layers": ()}, ["give model.first_layers=[full]"]),
        ("mistral", {"sliding_window": 4}, ["model.sliding_window = 4", "=3"]),
        ("deepseek", {"experts.bias_rate": 0.0}, ["model.experts.bias_rate = 0.0", "give model.experts.bias_rate=0.001"]),
        ("deepseek", {"latent.kv_rank": 6}, ["give model.latent.kv_rank=8"]),
        ("deepseek", {"attention_scale": None}, ["model.attention_scale = null"]),
    ],
)  # fmt: skip
def test_a_recipe_of_another_model_is_told_the_first_key_and_what_to_write(name, changes, words, tmp_path):
    made(tmp_path, name)
    c = read_config(tmp_path)[1]
    for key, value in changes.items():
        *path, last = key.split(".")
        if path:
            c = dataclasses.replace(c, **{path[0]: dataclasses.replace(getattr(c, path[0]), **{last: value})})
        else:
            c = dataclasses.replace(c, **{last: value})
    with pytest.raises(WeightsError) as caught:
        open_source(str(tmp_path), c)
    message = str(caught.value)
    assert all(w in message for w in [*words, f"python -m launch.export from={tmp_path}"]), message


def test_what_changes_no_function_may_differ(tmp_path):
    made(tmp_path, "mixtral")
    c = read_config(tmp_path)[1]
    trained = dataclasses.replace(
        c.experts, balance="global", balance_loss=0.1, z_loss=0.1, jitter=0.1, activation="silu"
    )
    other = dataclasses.replace(
        c,
        experts=trained,
        remat="none",
        compute_dtype="bfloat16",
        init_std=0.1,
        ffn_dim=7,
        attention_scale=published.H**-0.5,
    )
    assert differences(c, other) == [] and open_source(str(tmp_path), other).notes == []


def test_a_model_without_attention_has_none_of_its_keys():
    """Nor of RoPE's, where nothing turns; and without an MLP none of that."""
    alone = [
        "model.layer_pattern=[mamba2+none]",
        "model.last_layers=[]",
        "model.activation=silu",
        "model.attention_rope=true",
    ]
    c = compose(["model=nemotron_h_8b", *alone]).model
    other = dataclasses.replace(
        c, num_heads=2, num_kv_heads=2, head_dim=64, attention_scale=0.3, rope_base=7.0, ffn_dim=5
    )
    assert differences(c, other) == [] and family_of(other)[0] == "Mamba2ForCausalLM"
    plain = compose(["model=nemotron_h_8b"]).model
    assert differences(plain, dataclasses.replace(plain, rope_exact_from=0, rope_base=7.0)) == []
    assert differences(plain, dataclasses.replace(plain, ffn_dim=5, num_heads=2)) == ["num_heads", "ffn_dim"]


def test_no_step_of_nemotron_h_is_raised_by_who_reads_it():
    """transformers raises them to this key, which in the published code decides a start alone; and takes its logarithm."""
    config = FAMILIES["NemotronHForCausalLM"].config(compose(["model=nemotron_h_8b"]).model)
    assert 0 < config["time_step_min"] < np.log1p(np.exp(-40.0))


def test_writing_never_mixes_with_what_is_there(tmp_path):
    made(tmp_path / "theirs")
    c, leaves = loaded(tmp_path / "theirs")
    for to, words in ((tmp_path / "theirs", "already exists"), (tmp_path / "a" / "b", "no folder")):
        with pytest.raises(WeightsError, match=words):
            save(to, c, leaves.__getitem__)
    for wrong, words in (({"dtype": "float8"}, "float32, bfloat16"), ({"most": 0}, "positive")):
        with pytest.raises(WeightsError, match=words):
            save(tmp_path / "ours", c, leaves.__getitem__, **wrong)
    assert sorted(p.name for p in tmp_path.iterdir()) == ["theirs"]

    def fails(name):
        raise OSError(28, "No space left on device")

    with pytest.raises(WeightsError, match="takes 18,048 bytes, and its disk is full: free some"):
        save(tmp_path / "ours", c, fails)
    assert sorted(p.name for p in tmp_path.iterdir()) == ["theirs"], "incomplete output must not remain"
    (tmp_path / "ours.partial").mkdir()
    with pytest.raises(WeightsError, match=r"ours\.partial is left from an interrupted export"):
        save(tmp_path / "ours", c, leaves.__getitem__)
    (tmp_path / "ours.partial").rmdir()
    (tmp_path / "ours").mkdir()
    save(tmp_path / "ours", c, leaves.__getitem__)
    assert sorted(p.name for p in tmp_path.iterdir()) == ["ours", "theirs"]
    assert set(read_folder(tmp_path / "ours")) == set(published.shapes(published.MODELS["llama"]))


def test_a_parameter_without_a_rule_is_a_fault_of_the_table():
    with pytest.raises(ValueError, match=r"params\.embedding|params\.final_norm|params\.layers"):
        expand(Rules({"": [rule("model.norm.weight", "D", "final_norm: D")]}), DecoderConfig())


def test_a_run_of_another_model_is_named(tmp_path):
    with pytest.raises(WeightsError, match=r"model\.conv_width"):
        section_of({"model.conv_width": 3}, tmp_path)
    assert (
        section_of({"run.steps": 3, "model.experts.num": 0, "model.layer_pattern": ["full"]}, tmp_path)
        == DecoderConfig()
    )
    assert Recipe().model.init_from is None
