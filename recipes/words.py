"""What other trainers call our keys: torchtitan, MaxText, Megatron, the Trainer of transformers, and the field's short words.

A word is found by its last part, in lower case with underscores: `--per-device-train-batch-size` and `training.lr` as
`per_device_train_batch_size` and `lr`. Nothing is taken for another key in silence: a foreign word is answered with ours.
"""

from __future__ import annotations

import re
from collections.abc import Collection

# Ours -> theirs. Where several of ours have a word, a command's own option comes first, then the one that stands first here.
_MEANT = {
    # Options of commands.
    "to": "output output_dir out out_dir output_path save_dir destination export_dir out_file output_prefix",
    "source": "input inputs input_dir input_file corpus files raw_data text",
    "tokenizer": "tokenizer_path tokenizer_model tokenizer_name vocab vocab_file vocab_size",
    "text_key": "text_column text_field json_keys column field",
    "processes": "workers num_workers num_proc n_workers cpus jobs",
    "devices": "num_devices gpus num_gpus n_gpus ngpus chips num_chips world_size nproc cards",
    "device": "gpu hardware accelerator accelerator_type gpu_type chip tpu_type tpu compile_topology machine",
    "topology": "slice_shape tpu_topology",
    "slices": "num_slices compile_topology_num_slices",
    "devices_per_host": "gpus_per_node gpus_per_host nproc_per_node",
    "lengths": "context_lengths seq_lens max_length eval_lengths",
    "tasks": "task benchmarks metrics",
    "step": "checkpoint_step load_step ckpt_step iteration ckpt",
    "batches": "limit eval_iters eval_batches num_batches eval_steps",
    "examples": "num_samples num_examples limit_per_task",
    "nodes": "num_nodes nnodes hosts machines",
    "gpus_per_node": "gpus num_gpus gpus_per_host nproc_per_node",
    "hosts": "nodes num_nodes nnodes machines",
    "bandwidth": "report_file",
    "dtype": "torch_dtype precision save_dtype export_dtype",
    # Keys of a recipe.
    "optimizer.learning_rate": "lr max_lr peak_lr base_lr init_lr lr_peak peak_learning_rate",
    "optimizer.warmup_steps": (
        "warmup warmup_iters lr_warmup_iters num_warmup_steps warmup_steps_fraction warmup_ratio lr_warmup_fraction "
        "warmup_percentage"
    ),
    "optimizer.final_ratio": (
        "min_lr min_lr_ratio min_lr_factor lr_min_ratio cosine_learning_rate_final_fraction end_lr final_lr"
    ),
    "optimizer.schedule": (
        "scheduler lr_scheduler lr_scheduler_type lr_schedule lr_decay_style lr_schedule_type decay_type"
    ),
    "optimizer.decay_fraction": "decay_ratio decay_steps lr_decay_iters lr_wsd_decay_iters wsd_decay_steps_fraction",
    "optimizer.b1": "beta1 adam_beta1 adam_b1 betas",
    "optimizer.b2": "beta2 adam_beta2 adam_b2",
    "optimizer.eps": "epsilon adam_epsilon adam_eps",
    "optimizer.weight_decay": "wd adam_weight_decay",
    "optimizer.muon.momentum": "muon_momentum muon_beta muon_mu",
    "optimizer.muon.steps": "ns_steps newton_schulz_steps muon_num_ns_steps",
    "optimizer.muon.rms": "consistent_rms muon_extra_scale_factor muon_matched_adamw_rms matched_adamw_rms",
    "optimizer.muon.nesterov": "muon_use_nesterov use_nesterov",
    "optimizer.qk_clip": "qk_clip qkclip qk_clip_threshold muonclip muon_clip tau clip_qk",
    "optimizer.clip_norm": (
        "max_norm max_grad_norm grad_clip clip_grad gradient_clipping gradient_clip_val grad_norm_clip "
        "gradient_clipping_threshold clip"
    ),
    "optimizer": "optim opt_type optimizer_type optimizer_name",
    "mesh.sp": (
        "cp sequence_parallel sequence_parallel_size sequence_parallelism context_parallel context_parallel_size "
        "context_parallel_degree context_parallelism ici_context_parallelism ici_sequence_parallelism sp_size cp_size "
        "ring_degree ulysses_degree ulysses_sequence_parallel_size"
    ),
    "mesh.tp": (
        "tp tensor_parallel tensor_parallel_size tensor_parallel_degree tensor_model_parallel_size tensor_parallelism "
        "ici_tensor_parallelism tp_size model_parallel_size mp"
    ),
    "mesh.fsdp": (
        "fsdp zero zero_stage data_parallel_shard_degree dp_shard ici_fsdp_parallelism fully_shard fsdp_size sharding "
        "fsdp_config use_distributed_optimizer"
    ),
    "mesh.dp": (
        "dp ddp data_parallel data_parallel_size data_parallel_degree data_parallel_replicate_degree dp_replicate "
        "dp_size ici_data_parallelism dcn_data_parallelism replicas"
    ),
    "mesh.ep": (
        "ep expert_parallel expert_parallel_size expert_parallel_degree expert_model_parallel_size expert_parallelism "
        "ici_expert_parallelism ep_size"
    ),
    "mesh.fsdp_across_slices": "dcn_fsdp_parallelism",
    "mesh": "parallelism parallel_config strategy",
    "sequence.scheme": (
        "cp_comm_type context_parallel_method attention_parallelism cp_method context_parallel_strategy"
    ),
    "sequence.order": "load_balance context_parallel_load_balance zigzag",
    "sequence.stripe": "stripe stripe_size dispatch_chunk_size",
    "data.sequence_length": (
        "seq_len seqlen seq_length sequence_len max_seq_len max_seq_length max_length max_target_length block_size "
        "context_length context_len ctx_len max_position_embeddings n_ctx model_max_length max_tokens"
    ),
    "data.global_batch": (
        "batch_size bs batch global_batch_size train_batch_size local_batch_size micro_batch_size mbs gbs "
        "per_device_batch_size per_device_train_batch_size batch_size_per_gpu tokens_per_batch"
    ),
    "accumulation": (
        "gradient_accumulation gradient_accumulation_steps grad_accum grad_accum_steps accumulate_grad_batches "
        "accumulation_steps num_microbatches microbatches"
    ),
    "data.source": (
        "dataset dataset_path dataset_name train_files train_file train_data data_path data_dir dataset_dir datasets "
        "hf_path dataset_config grain_train_files train_data_path"
    ),
    "data.tokenizer": (
        "tokenizer tokenizer_path tokenizer_name tokenizer_model tokenizer_name_or_path hf_assets_path processing_class"
    ),
    "data.bos": "add_bos_token add_bos bos_token prepend_bos add_special_tokens bos",
    "data.eos": "add_eos_token add_eos eos_token append_eod append_eos eod eos",
    "data.text_key": "text_column text_field dataset_text_field text_column_name train_data_columns",
    "data.mixture": "data_mix mix blend data_blend dataset_weights",
    "data.packing": "packing sample_packing pack packed",
    "data.balance": "balance_batch group_by_length length_grouping use_dynamic_bsz sequence_balancing",
    "data.prefetch": "num_workers dataloader_num_workers prefetch_factor grain_worker_count",
    "data.cache_dir": "cache cache_path",
    "run.steps": (
        "max_steps train_steps train_iters num_steps total_steps iters max_iters num_iterations training_steps n_steps"
    ),
    "checkpoint.dir": "ckpt_dir checkpoint_dir checkpoint_folder checkpoint_path save_folder checkpoint_directory",
    "run.dir": (
        "checkpoint checkpoint_dir ckpt_dir checkpoint_path model_dir output_dir out_dir output save_dir save run_dir "
        "base_output_directory output_path dump_folder log_dir logging_dir workdir exp_dir run_name experiment_name "
        "project_dir default_root_dir results_dir"
    ),
    "run.trackers": (
        "wandb use_wandb report_to wandb_project wandb_entity tracker log_with enable_wandb enable_tensorboard tensorboard "
        "tensorboard_dir mlflow comet logger"
    ),
    "run.profile": "profiler enable_profiling profile_freq profile_step_start use_pytorch_profiler",
    "evaluation.every": (
        "do_eval eval_interval eval_every eval_strategy evaluation_strategy val_check_interval eval_freq validation eval"
    ),
    "evaluation.data": "eval_dataset validation_file eval_data val_data",
    "run.seed": "random_seed rng_seed data_seed init_weights_seed",
    "checkpoint.every": (
        "save_steps save_interval checkpoint_interval checkpoint_period checkpoint_every save_every save_freq "
        "ckpt_interval"
    ),
    "checkpoint.keep": "save_total_limit keep_latest_k max_to_keep max_num_checkpoints_to_keep keep_last",
    "model.init_from": (
        "load load_checkpoint load_parameters_path pretrained pretrained_model finetune_from initial_load_path "
        "model_name_or_path model_path hf_model from_pretrained base_model init_ckpt restore_from weights load_path "
        "pretrained_checkpoint"
    ),
    "lora.rank": "rank lora lora_rank lora_r lora_dim",
    "lora.alpha": "lora_alpha",
    "lora.targets": "target_modules lora_target lora_target_modules lora_modules",
    "model": "model_name flavor model_flavor arch architecture model_type config_name model_size model_config",
    "model.compute_dtype": (
        "dtype bf16 fp16 precision mixed_precision mixed_precision_param amp torch_dtype bfloat16 param_dtype "
        "params_dtype half compute_type"
    ),
    "model.remat": (
        "activation_checkpointing activation_checkpoint gradient_checkpointing recompute recompute_granularity "
        "recompute_activations remat_policy checkpoint_activations selective_ac_option ac_mode"
    ),
    "model.mtp.modules": "mtp_num_layers num_nextn_predict_layers num_mtp_layers num_mtp_modules mtp_num_modules",
    "model.mtp.weight": "mtp_loss_scaling_factor mtp_loss_weight mtp_lambda",
    "model.num_layers": "layers n_layers n_layer num_hidden_layers num_decoder_layers base_num_decoder_layers depth",
    "model.model_dim": "dim d_model hidden_size hidden_dim emb_dim base_emb_dim n_embd embed_dim width",
    "model.num_heads": "heads n_heads n_head num_attention_heads base_num_query_heads num_query_heads",
    "model.num_kv_heads": "kv_heads n_kv_heads num_key_value_heads base_num_kv_heads num_query_groups",
    "model.head_dim": "kv_channels d_head head_size",
    "model.ffn_dim": "mlp_dim intermediate_size ffn_hidden_size base_mlp_dim d_ff ffn_size hidden_mult",
    "model.vocab_size": "vocab padded_vocab_size n_vocab",
    "model.norm_eps": "rms_norm_eps layernorm_epsilon norm_epsilon normalization_layer_epsilon",
    "model.zero_centered_norms": "zero_centered_gamma layernorm_zero_centered_gamma apply_layernorm_1p",
    "model.init_std": "initializer_range init_method_std",
    "model.rope_base": "rope_theta rotary_base rope_max_timescale theta rope_frequency_base",
    "model.rope_scaling": "rope_type rope_scaling_type yarn",
    "model.rope_factor": "rope_scaling_factor",
    "model.rope_original_length": "original_max_position_embeddings original_seq_len",
    "model.sliding_window": "window window_size attention_window sliding_window_size",
    "model.sparse.block_size": "block_size nsa_block_size",
    "model.sparse.num_blocks": "block_counts num_selected_blocks selected_block_count",
    "model.sparse.window": "window nsa_window",
    "model.tie_embeddings": (
        "tie_word_embeddings weight_tying share_embeddings logits_via_embedding enable_weight_tying"
    ),
    "model.activation": "hidden_act activation_function mlp_activations act_fn mlp_hidden_act squared_relu",
    "model.experts.num": "num_experts num_local_experts n_routed_experts moe_num_experts experts_num n_experts",
    "model.experts.top_k": "moe_router_topk num_experts_per_tok top_k moe_top_k num_experts_per_token topk",
    "model.experts.balance_loss": (
        "aux_loss moe_aux_loss_coeff router_aux_loss_coef load_balance_loss_weight aux_loss_coef"
    ),
    "model.experts.ffn_dim": "moe_intermediate_size moe_ffn_hidden_size moe_mlp_dim base_moe_mlp_dim",
    "model.gated_delta.num_key_heads": "linear_num_key_heads",
    "model.gated_delta.num_value_heads": "linear_num_value_heads",
    "model.gated_delta.key_dim": "linear_key_head_dim",
    "model.gated_delta.value_dim": "linear_value_head_dim",
    "model.gated_delta.conv_width": "linear_conv_kernel_dim",
    "model.kda.conv_width": "short_conv_kernel_size conv_size",
    "model.latent.rope": "mla_use_nope",
    "model.gla.rank": "gate_low_rank_dim",
    "model.gla.normalizer": "gate_logit_normalizer",
    "model.rwkv7.decay_rank": "decay_low_rank_dim",
    "model.rwkv7.rate_rank": "a_low_rank_dim",
    "model.layer_pattern": "hybrid_override_pattern layers_block_type hybrid_layer_pattern",
    "model.mamba2.num_heads": "mamba_num_heads mamba_n_heads",
    "model.mamba2.head_dim": "mamba_head_dim mamba_d_head",
    "model.mamba2.state_dim": "ssm_state_size mamba_d_state d_state",
    "model.mamba2.num_groups": "mamba_n_groups ssm_ngroups",
    "model.mamba2.conv_width": "mamba_d_conv d_conv",
    "experts.capacity": "capacity_factor moe_capacity_factor moe_expert_capacity_factor expert_capacity",
    "experts.dispatch": "moe_token_dispatcher_type dispatcher all_to_all expert_dispatch",
    "experts.overlap": "overlap_moe_expert_parallel_comm enable_two_batch_overlap dual_pipe combined_1f1b",
    "z_loss": "z_loss_multiplier zloss z_loss_weight",
    "platform": "backend kernel kernel_backend",
    "deterministic_attention": "deterministic deterministic_mode full_determinism",
    "guards.nonfinite": "check_for_nan_in_loss skip_nan skip_step_on_nan check_nan detect_anomaly",
    "guards.spike": "skip_spikes loss_spike loss_spike_threshold",
    "guards.hang_seconds": "distributed_timeout_minutes nccl_timeout ddp_timeout watchdog_timeout",
    "cluster": "distributed distributed_type launcher multihost",
    "cluster.coordinator": "master_addr coordinator_address rdzv_endpoint master_port jax_distributed_init",
    "cluster.num_processes": "nnodes num_nodes nodes world_size num_machines",
    "cluster.process_id": "node_rank rank machine_rank process_index",
    "cluster.local_device_ids": "local_rank gpu_ids device_ids visible_devices cuda_visible_devices",
    "curriculum": "stages phases length_schedule seq_len_schedule",
}

# What has no key, and what to do.
_TOLD = (
    (
        "the fastest kernel that takes the call is chosen; platform=xla asks for the plain one",
        "attn_implementation attention_impl attn_impl attention attention_type flash_attention use_flash_attn "
        "use_flash_attention attn_backend flash_attn flash",
    ),
    (
        "there is nothing to switch on: the same command resumes from the last checkpoint in run.dir, and another "
        "run.dir starts anew",
        "resume resume_from resume_from_checkpoint auto_resume load_optim restart overwrite_output_dir restore "
        "enable_checkpointing",
    ),
    (
        "a run ends at run.steps=N; its first lines say how many steps are one pass over the data",
        "epochs num_epochs num_train_epochs max_epochs n_epochs epoch",
    ),
    (
        "there are no pipelines; split parameters with mesh.fsdp, features with mesh.tp, and the sequence with mesh.sp",
        "pp pipeline pipeline_parallel pipeline_parallel_size pipeline_parallel_degree "
        "pipeline_model_parallel_size ici_pipeline_parallelism num_layers_per_virtual_pipeline_stage pp_size "
        "pipeline_parallelism",
    ),
    (
        "every step has a row in metrics.jsonl; the terminal shows a line every ten seconds",
        "logging_steps log_freq log_interval log_every log_period disp_freq print_freq",
    ),
    (
        "lora.rank=16 trains adapters, lora.base=int8 of a model in 8 bits; parameters that are trained are float32; "
        "launch.generate weights=int4 generates in 4 bits, and launch.evaluate weights=int4 measures what that loses",
        "use_peft peft qlora load_in_4bit load_in_8bit quantization quantize",
    ),
    (
        "model.precision=fp8_block computes the products of layers in 8 bits, and model.precision_head=true that of the output "
        "projection too",
        "fp8 enable_fp8 float8 fp8_recipe fp8_lm_head",
    ),
    (
        "every step is compiled; finalists=0 of launch.plan predicts a plan and compiles nothing",
        "compile torch_compile jit",
    ),
    (
        "there is no file of another launcher; give the mesh: mesh.fsdp=8 mesh.sp=2, or ask python -m launch.plan",
        "deepspeed accelerate_config ds_config fsdp_transformer_layer_cls_to_wrap",
    ),
    (
        "a recipe of your own is --config-dir DIR recipe=NAME, for DIR/recipe/NAME.yaml",
        "config config_file config_path yaml",
    ),
    (
        "export with python -m launch.export run.dir=DIR to=DIR",
        "push_to_hub hub_model_id hf_export save_hf convert_to_hf",
    ),
    (
        "leave it out: the command says what is done",
        "do_train training train trainer job mode",
    ),
    (
        "ask python -m launch.plan what fits",
        "dry_run plan estimate estimate_memory memory_estimation fake_backend",
    ),
    (
        "give run.steps=3",
        "fast_dev_run debug smoke",
    ),
    (
        "activations are offloaded with model.remat=offload",
        "offload cpu_offload optimizer_offload offload_optimizer",
    ),
    (
        "there are no loops of reinforcement learning",
        "reward ppo grpo rlhf rl",
    ),
    (
        "a plugin registers it, as examples/dpo_loss.py and examples/distillation.py do: plugins=[MODULE] loss=NAME",
        "dpo loss_fn loss_type criterion distillation kd teacher",
    ),
)


def _table() -> dict[str, list[str]]:
    table: dict[str, list[str]] = {}
    for ours, theirs in _MEANT.items():
        for word in theirs.split():
            table.setdefault(word, []).append(ours)
    return table


MEANT = _table()
TOLD = {word: what for what, words in _TOLD for word in words.split()}

# What a word counts or means differently, beside the key that it leads to.
NOTES = {
    "data.global_batch": "It counts the rows of a step over all devices",
    "mesh.sp": "It splits each sequence over devices; mesh.cp is for groups of them",
    "run.trackers": "run.trackers=[wandb] sends the metrics there; metrics.jsonl and TensorBoard events are always written",
    "mesh.dp": "It counts replicas; mesh.fsdp shards parameters too",
    "model.init_from": "With model=hf the model is that of the folder's config.json",
    "model.compute_dtype": "It is bfloat16 or float32; parameters stay float32. model=hf takes that of the folder",
    "data.tokenizer": "It takes a tokenizer.json, or a folder with one, here or in gs://",
    "data.bos": "auto follows the tokenizer's folder, null is none",
    "data.eos": "auto follows the tokenizer's folder, null is none",
    "optimizer.warmup_steps": "It counts steps",
    "optimizer.final_ratio": "It is the last rate over the largest",
    "cluster": "cluster=auto finds the other processes",
}

# Of ours, the keys and groups of a recipe: those from the first of them on.
_RECIPE = [*_MEANT][[*_MEANT].index("optimizer.learning_rate") :]
# Keys whose values have names here that other trainers use for something else.
_NAMES_OF_ITS_OWN = (
    "model.remat",
    "optimizer.schedule",
    "optimizer",
    "mesh",
    "cluster",
    "sequence.scheme",
    "experts.dispatch",
    "experts.overlap",
)


def last_part(word: str) -> str:
    """Returns a word as the tables have it: without dashes before it, sections, and signs between its parts."""
    return re.sub(r"[-\s]+", "_", word.lstrip("-+~").partition("=")[0].strip().lower()).rpartition(".")[2]


def meaning(word: str, known: Collection[str]) -> str | None:
    """Returns the sentence that leads from another trainer's word to ours, None for a word that is not known.

    Args:
      known: the options, keys and groups that may stand here; those of the command itself come first.
    """
    name = last_part(word)
    ours = next((key for key in MEANT.get(name, ()) if key in known), None)
    if ours is not None:
        return f"did you mean {ours!r}?{f' {NOTES[ours]}' if ours in NOTES else ''}"
    return TOLD.get(name)


def of_flag(word: str, value: str | None, known: Collection[str] | None = None) -> str | None:
    """Returns what to write in place of another trainer's flag, `--lr 3e-4`; None for one that is not known.

    Args:
      value: what follows the flag, None if it has none.
      known: as in `meaning`; None for the keys of a recipe.
    """
    name = word.lstrip("-").partition("=")[0]
    if known is None:
        known = [
            *_RECIPE,
            *([name] if re.fullmatch(r"[a-z]+(\.[a-z_0-9]+)+", name) and last_part(name) not in MEANT else []),
        ]
    ours = next((k for k in (name, name.replace("-", "_"), *MEANT.get(last_part(word), ())) if k in known), None)
    if ours is not None:
        from ejdist.dtypes import dtype_name  # with which JAX is imported

        if ours in _NAMES_OF_ITS_OWN:
            return f"keys are written KEY=VALUE: {ours}=...; --help {ours} says what it takes"
        value = dtype_name(name if value is None else value) if ours.endswith("dtype") else value
        note = f". {NOTES[ours]}" if ours in NOTES and ours not in (name, name.replace("-", "_")) else ""
        return f"keys are written KEY=VALUE: {ours}={'...' if value is None else value}{note}"
    return TOLD.get(last_part(word))
