"""Maps keys and classes of other trainers to their names here.

Errors that meet one of them name ours (`describe_key`, `describe_class`), and `docs/from_verl.md`
lists all of them. A name of theirs may end in `.*`, which is every key below it.
"""

from __future__ import annotations

import re

VERL_KEYS = {
    "actor_rollout_ref.model.path": "`model.path`",
    "actor_rollout_ref.model.lora_rank": "`model.lora.rank`",
    "actor_rollout_ref.model.lora_alpha": "`model.lora.alpha`",
    "actor_rollout_ref.model.target_modules": "`model.lora.targets`",
    "actor_rollout_ref.model.enable_gradient_checkpointing": "`parallel.recompute`",
    "actor_rollout_ref.actor.ppo_mini_batch_size": "`optim.num_minibatches`, their number and not "
    "their size",
    "actor_rollout_ref.actor.ppo_micro_batch_size_per_gpu": "`optim.micro_batch_tokens`, in tokens",
    "actor_rollout_ref.actor.ppo_max_token_len_per_gpu": "`optim.micro_batch_tokens`",
    "actor_rollout_ref.actor.use_dynamic_bsz": "always on: `optim.micro_batch_tokens`",
    "actor_rollout_ref.actor.grad_clip": "`optim.grad_clip`",
    "actor_rollout_ref.actor.clip_ratio": "`algo.loss_options.clip_low` and "
    "`algo.loss_options.clip_high`",
    "actor_rollout_ref.actor.clip_ratio_low": "`algo.loss_options.clip_low`",
    "actor_rollout_ref.actor.clip_ratio_high": "`algo.loss_options.clip_high`",
    "actor_rollout_ref.actor.clip_ratio_c": "`algo.loss_options.clip_dual`",
    "actor_rollout_ref.actor.policy_loss.loss_mode": "`algo.loss`",
    "actor_rollout_ref.actor.loss_agg_mode": "`algo.loss_aggregation`",
    "actor_rollout_ref.actor.entropy_coeff": "`algo.entropy_coef`",
    "actor_rollout_ref.actor.use_kl_loss": "`algo.kl_coef` above 0 with `algo.kl_placement`",
    "actor_rollout_ref.actor.kl_loss_coef": "`algo.kl_coef`",
    "actor_rollout_ref.actor.kl_loss_type": "`algo.kl_estimator`",
    "actor_rollout_ref.actor.ppo_epochs": "no setting: each rollout is trained on once",
    "actor_rollout_ref.actor.ulysses_sequence_parallel_size": "`parallel.context`",
    "actor_rollout_ref.actor.optim.lr": "`optim.lr`",
    "actor_rollout_ref.actor.optim.lr_warmup_steps": "`optim.lr_warmup_steps`",
    "actor_rollout_ref.actor.optim.lr_warmup_steps_ratio": "`optim.lr_warmup_steps`, in steps",
    "actor_rollout_ref.actor.optim.weight_decay": "`optim.weight_decay`",
    "actor_rollout_ref.actor.optim.warmup_style": "`optim.lr_schedule`",
    "actor_rollout_ref.actor.optim.lr_scheduler_type": "`optim.lr_schedule`",
    "actor_rollout_ref.actor.fsdp_config.*": "no setting: the policy is Megatron's, laid out by "
    "`parallel.tensor`, `parallel.pipeline` and `parallel.data`",
    "actor_rollout_ref.actor.strategy": "no setting: the policy is always Megatron's",
    "actor_rollout_ref.actor.megatron.tensor_model_parallel_size": "`parallel.tensor`",
    "actor_rollout_ref.actor.megatron.pipeline_model_parallel_size": "`parallel.pipeline`",
    "actor_rollout_ref.actor.megatron.virtual_pipeline_model_parallel_size": "`parallel."
    "virtual_pipeline`",
    "actor_rollout_ref.actor.megatron.context_parallel_size": "`parallel.context`",
    "actor_rollout_ref.actor.megatron.expert_model_parallel_size": "`parallel.expert`",
    "actor_rollout_ref.actor.megatron.expert_tensor_parallel_size": "`parallel.expert_tensor`",
    "actor_rollout_ref.actor.megatron.sequence_parallel": "`parallel.sequence_parallel`",
    "actor_rollout_ref.actor.megatron.override_transformer_config.*": "`model.megatron`",
    "actor_rollout_ref.actor.optim.override_optimizer_config.*": "`optim.megatron`",
    "actor_rollout_ref.actor.megatron.*": "`parallel.tensor` and the other keys of `parallel`",
    "actor_rollout_ref.ref.*": "no setting: the reference has the layout of the policy; "
    "`model.reference_path` names another one",
    "actor_rollout_ref.hybrid_engine": "`cluster.colocated`",
    "actor_rollout_ref.rollout.name": "no setting: the engines are vLLM's",
    "actor_rollout_ref.rollout.mode": "no setting: rollouts are always asynchronous",
    "actor_rollout_ref.rollout.n": "`rollout.group_size`",
    "actor_rollout_ref.rollout.temperature": "`rollout.temperature`",
    "actor_rollout_ref.rollout.top_p": "`rollout.top_p`",
    "actor_rollout_ref.rollout.top_k": "`rollout.top_k`, where 0 and not -1 disables it",
    "actor_rollout_ref.rollout.prompt_length": "`data.max_prompt_tokens`",
    "actor_rollout_ref.rollout.response_length": "`rollout.max_response_tokens`",
    "actor_rollout_ref.rollout.tensor_model_parallel_size": "`engine.tensor_parallel_size`",
    "actor_rollout_ref.rollout.gpu_memory_utilization": "`engine.gpu_memory_utilization`",
    "actor_rollout_ref.rollout.max_model_len": "`engine.max_model_len`",
    "actor_rollout_ref.rollout.max_num_seqs": "`engine.max_num_seqs`",
    "actor_rollout_ref.rollout.enforce_eager": "`engine.enforce_eager`",
    "actor_rollout_ref.rollout.engine_kwargs.vllm.*": "`engine.vllm`",
    "actor_rollout_ref.rollout.dtype": "`model.dtype`",
    "actor_rollout_ref.rollout.calculate_log_probs": "always on: `algo.rollout_correction` uses "
    "them",
    "actor_rollout_ref.rollout.val_kwargs.n": "`evaluate.num_samples`",
    "actor_rollout_ref.rollout.val_kwargs.temperature": "`evaluate.temperature`",
    "actor_rollout_ref.rollout.val_kwargs.do_sample": "`evaluate.greedy` adds a greedy answer",
    "actor_rollout_ref.rollout.multi_turn.enable": "always on: tools are used if there are any",
    "actor_rollout_ref.rollout.multi_turn.tool_config_path": "`tool.user_tools_file`",
    "actor_rollout_ref.rollout.multi_turn.interaction_config_path": "`rollout."
    "interaction_config_file`",
    "actor_rollout_ref.rollout.multi_turn.max_assistant_turns": "`rollout.max_turns`",
    "actor_rollout_ref.rollout.multi_turn.max_user_turns": "`max_turns` of an entry of "
    "`rollout.interaction_config_file`",
    "actor_rollout_ref.rollout.multi_turn.max_tool_response_length": "`tool.max_response_tokens`, "
    "in tokens",
    "actor_rollout_ref.rollout.multi_turn.format": "`rollout.call_protocol`",
    "actor_rollout_ref.rollout.multi_turn.use_inference_chat_template": "`rollout."
    "use_inference_chat_template`",
    "actor_rollout_ref.rollout.multi_turn.tokenization_sanity_check_mode": "`rollout."
    "template_check`",
    "actor_rollout_ref.rollout.agent.agent_loop_config_path": "`rollout.agent`",
    "actor_rollout_ref.rollout.agent.default_agent_loop": "`rollout.agent`",
    "actor_rollout_ref.rollout.agent.num_workers": "no setting: one process runs all rollouts",
    "actor_rollout_ref.rollout.update_weights_bucket_megabytes": "`weight_sync.bucket_mib`",
    "actor_rollout_ref.rollout.trace.*": "`report.trace_destination`",
    "algorithm.adv_estimator": "`algo` (a preset) or `algo.advantage`",
    "algorithm.gamma": "`algo.advantage_options.gamma`",
    "algorithm.lam": "`algo.advantage_options.lam`",
    "algorithm.norm_adv_by_std_in_grpo": "`algo.advantage_options.norm_by_std`",
    "algorithm.use_kl_in_reward": "`algo.kl_placement=reward`",
    "algorithm.kl_penalty": "`algo.kl_estimator`",
    "algorithm.kl_ctrl.kl_coef": "`algo.kl_coef`",
    "algorithm.kl_ctrl.target_kl": "`algo.kl_target`",
    "algorithm.kl_ctrl.type": "`algo.kl_target` makes it adaptive",
    "algorithm.filter_groups.enable": "`rollout.filter_metric`",
    "algorithm.filter_groups.metric": "`rollout.filter_metric` with `rollout.filter_range`",
    "algorithm.rollout_correction.*": "`algo.rollout_correction` and `algo.rollout_correction_cap`",
    "critic.optim.lr": "`optim.critic_lr`",
    "critic.*": "`algo=ppo` starts a critic; it has the settings of the policy",
    "trainer.critic_warmup": "`optim.critic_warmup_steps`",
    "custom_reward_function.path": "`reward.functions`",
    "custom_reward_function.name": "`reward.functions`, as `FILE.py:NAME`",
    "reward.custom_reward_function.path": "`reward.functions`",
    "reward_model.model.path": "`reward.model.path_or_url`",
    "reward_model.reward_manager": "`reward.rubric`",
    "reward_model.*": "`reward.model.path_or_url` and `reward.rubric`",
    "data.train_files": "`data.train`",
    "data.val_files": "`data.validation`",
    "data.train_batch_size": "`data.prompts_per_step`",
    "data.gen_batch_size": "`rollout.num_oversampled_prompts`, beyond `data.prompts_per_step`",
    "data.val_batch_size": "no setting: a validation samples all questions at once",
    "data.val_max_samples": "`evaluate.num_questions`",
    "data.max_prompt_length": "`data.max_prompt_tokens`",
    "data.max_response_length": "`rollout.max_response_tokens`",
    "data.shuffle": "`data.order`",
    "data.filter_overlong_prompts": "`data.truncation=drop`",
    "data.return_raw_chat": "no setting: messages are always kept",
    "data.custom_cls.path": "`data.dataset_class`",
    "data.custom_cls.name": "`data.dataset_class`, as `FILE.py:NAME`",
    "data.tool_config_path": "`tool.user_tools_file`",
    "trainer.total_epochs": "`total_epochs`",
    "trainer.total_training_steps": "`total_steps`",
    "trainer.save_freq": "`save_every_steps`",
    "trainer.test_freq": "`evaluate.every_steps`",
    "trainer.val_before_train": "`evaluate.before_training`",
    "trainer.val_only": "`total_steps=0`",
    "trainer.logger": "`report.trackers`",
    "trainer.project_name": "the variable WANDB_PROJECT or MLFLOW_EXPERIMENT_NAME",
    "trainer.experiment_name": "the name of the folder `run_dir`",
    "trainer.default_local_dir": "`run_dir`",
    "trainer.resume_mode": "`resume`",
    "trainer.rollout_data_dir": "`report.save_trees_every_steps`",
    "trainer.n_gpus_per_node": "no setting: `parallel` and `cluster.num_engines` decide",
    "trainer.nnodes": "no setting: Ray's nodes are used, `cluster.ray_address`",
}
"""Ours by key of verl's configuration."""

NEMO_RL_KEYS = {
    "grpo.num_prompts_per_step": "`data.prompts_per_step`",
    "grpo.num_generations_per_prompt": "`rollout.group_size`",
    "grpo.max_rollout_turns": "`rollout.max_turns`",
    "grpo.max_num_steps": "`total_steps`",
    "grpo.max_num_epochs": "`total_epochs`",
    "grpo.normalize_rewards": "`algo.advantage_options.norm_by_std`",
    "grpo.use_leave_one_out_baseline": "`algo=rloo`",
    "grpo.use_dynamic_sampling": "`rollout.filter_metric`",
    "grpo.val_period": "`evaluate.every_steps`",
    "grpo.val_at_start": "`evaluate.before_training`",
    "grpo.max_val_samples": "`evaluate.num_questions`",
    "grpo.seed": "`seed`",
    "grpo.async_grpo.enabled": "`rollout.max_staleness` above 0",
    "grpo.async_grpo.max_trajectory_age_steps": "`rollout.max_staleness`",
    "loss_fn.reference_policy_kl_penalty": "`algo.kl_coef`",
    "loss_fn.reference_policy_kl_type": "`algo.kl_estimator`",
    "loss_fn.ratio_clip_min": "`algo.loss_options.clip_low`",
    "loss_fn.ratio_clip_max": "`algo.loss_options.clip_high`",
    "loss_fn.ratio_clip_c": "`algo.loss_options.clip_dual`",
    "loss_fn.use_importance_sampling_correction": "`algo.rollout_correction`",
    "loss_fn.sequence_level_importance_ratios": "`algo=gspo`",
    "loss_fn.token_level_loss": "`algo.loss_aggregation`",
    "policy.model_name": "`model.path`",
    "policy.train_global_batch_size": "`optim.num_minibatches`, their number and not their size",
    "policy.train_micro_batch_size": "`optim.micro_batch_tokens`, in tokens",
    "policy.max_total_sequence_length": "`engine.max_model_len`",
    "policy.precision": "`model.dtype`",
    "policy.max_grad_norm": "`optim.grad_clip`",
    "policy.optimizer.kwargs.lr": "`optim.lr`",
    "policy.megatron_cfg.optimizer.lr": "`optim.lr`",
    "policy.megatron_cfg.optimizer.weight_decay": "`optim.weight_decay`",
    "policy.megatron_cfg.tensor_model_parallel_size": "`parallel.tensor`",
    "policy.megatron_cfg.pipeline_model_parallel_size": "`parallel.pipeline`",
    "policy.megatron_cfg.context_parallel_size": "`parallel.context`",
    "policy.megatron_cfg.expert_model_parallel_size": "`parallel.expert`",
    "policy.megatron_cfg.expert_tensor_parallel_size": "`parallel.expert_tensor`",
    "policy.megatron_cfg.sequence_parallel": "`parallel.sequence_parallel`",
    "policy.megatron_cfg.activation_checkpointing": "`parallel.recompute`",
    "policy.megatron_cfg.*": "`parallel.tensor` and the other keys of `parallel`",
    "policy.dtensor_cfg.*": "no setting: the policy is Megatron's, laid out by `parallel.tensor` "
    "and `parallel.context`",
    "policy.sequence_packing.*": "always on: `optim.micro_batch_tokens`",
    "policy.dynamic_batching.*": "always on: `optim.micro_batch_tokens`",
    "policy.generation.temperature": "`rollout.temperature`",
    "policy.generation.top_p": "`rollout.top_p`",
    "policy.generation.top_k": "`rollout.top_k`",
    "policy.generation.max_new_tokens": "`rollout.max_response_tokens`",
    "policy.generation.colocated.enabled": "`cluster.colocated`",
    "policy.generation.vllm_cfg.tensor_parallel_size": "`engine.tensor_parallel_size`",
    "policy.generation.vllm_cfg.gpu_memory_utilization": "`engine.gpu_memory_utilization`",
    "policy.generation.vllm_cfg.max_model_len": "`engine.max_model_len`",
    "policy.generation.vllm_cfg.enforce_eager": "`engine.enforce_eager`",
    "policy.generation.vllm_kwargs.*": "`engine.vllm`",
    "data.max_input_seq_length": "`data.max_prompt_tokens`",
    "data.dataset_name": "`data.train`, a file",
    "data.train_data_path": "`data.train`",
    "data.val_data_path": "`data.validation`",
    "data.prompt_file": "`data.prompt_template`",
    "env.*": "`reward.rubric`, `reward.functions` and `rollout.agent`",
    "checkpointing.checkpoint_dir": "`run_dir`",
    "checkpointing.save_period": "`save_every_steps`",
    "logger.wandb_enabled": "`report.trackers=[wandb]`",
    "logger.tensorboard_enabled": "`report.trackers=[tensorboard]`",
    "logger.mlflow_enabled": "`report.trackers=[mlflow]`",
    "logger.log_dir": "`run_dir`",
    "cluster.gpus_per_node": "no setting: `parallel` and `cluster.num_engines` decide",
    "cluster.num_nodes": "no setting: Ray's nodes are used, `cluster.ray_address`",
}
"""Ours by key of NeMo-RL's configuration."""

SLIME_FLAGS = {
    "--hf-checkpoint": "`model.path`",
    "--ref-load": "`model.reference_path`",
    "--load": "`resume`: the run folder is continued",
    "--save": "`run_dir`",
    "--save-interval": "`save_every_steps`",
    "--prompt-data": "`data.train`",
    "--eval-prompt-data": "`data.validation`",
    "--input-key": "`data.prompt_key`",
    "--label-key": "no setting: the answer is `reward_model.ground_truth` of a row",
    "--rollout-shuffle": "`data.order`",
    "--num-rollout": "`total_steps`",
    "--num-epoch": "`total_epochs`",
    "--rollout-batch-size": "`data.prompts_per_step`",
    "--over-sampling-batch-size": "`rollout.num_oversampled_prompts`, beyond "
    "`data.prompts_per_step`",
    "--n-samples-per-prompt": "`rollout.group_size`",
    "--global-batch-size": "`optim.num_minibatches`, their number and not their size",
    "--num-steps-per-rollout": "`optim.num_minibatches`",
    "--max-tokens-per-gpu": "`optim.micro_batch_tokens`",
    "--use-dynamic-batch-size": "always on: `optim.micro_batch_tokens`",
    "--rollout-max-prompt-len": "`data.max_prompt_tokens`",
    "--rollout-max-response-len": "`rollout.max_response_tokens`",
    "--rollout-max-context-len": "`engine.max_model_len`",
    "--rollout-temperature": "`rollout.temperature`",
    "--rollout-top-p": "`rollout.top_p`",
    "--rollout-top-k": "`rollout.top_k`",
    "--partial-rollout": "`rollout.partial_rollout`",
    "--dynamic-sampling-filter-path": "`rollout.filter_metric`",
    "--custom-generate-function-path": "`rollout.agent`",
    "--rollout-function-path": "`rollout.agent`",
    "--custom-rm-path": "`reward.functions`",
    "--rm-type": "`reward.rubric`",
    "--rm-url": "`reward.model.path_or_url`",
    "--eval-interval": "`evaluate.every_steps`",
    "--n-samples-per-eval-prompt": "`evaluate.num_samples`",
    "--advantage-estimator": "`algo` (a preset) or `algo.advantage`",
    "--eps-clip": "`algo.loss_options.clip_low`",
    "--eps-clip-high": "`algo.loss_options.clip_high`",
    "--eps-clip-c": "`algo.loss_options.clip_dual`",
    "--entropy-coef": "`algo.entropy_coef`",
    "--kl-coef": "`algo.kl_coef` with `algo.kl_placement=reward`",
    "--use-kl-loss": "`algo.kl_coef` above 0",
    "--kl-loss-coef": "`algo.kl_coef`",
    "--kl-loss-type": "`algo.kl_estimator`",
    "--use-tis": "`algo.rollout_correction`",
    "--use-rollout-logprobs": "`algo.old_log_probs=engine`",
    "--tis-clip": "`algo.rollout_correction_cap`",
    "--custom-loss-function-path": "`algo.loss`",
    "--lr": "`optim.lr`",
    "--lr-decay-style": "`optim.lr_schedule`",
    "--lr-warmup-iters": "`optim.lr_warmup_steps`",
    "--weight-decay": "`optim.weight_decay`",
    "--clip-grad": "`optim.grad_clip`",
    "--tensor-model-parallel-size": "`parallel.tensor`",
    "--pipeline-model-parallel-size": "`parallel.pipeline`",
    "--context-parallel-size": "`parallel.context`",
    "--expert-model-parallel-size": "`parallel.expert`",
    "--expert-tensor-parallel-size": "`parallel.expert_tensor`",
    "--sequence-parallel": "`parallel.sequence_parallel`",
    "--recompute-granularity": "`parallel.recompute`",
    "--colocate": "`cluster.colocated`",
    "--rollout-num-gpus-per-engine": "`engine.tensor_parallel_size`",
    "--rollout-num-gpus": "`cluster.num_engines` x `engine.tensor_parallel_size`",
    "--sglang-mem-fraction-static": "`engine.gpu_memory_utilization`",
    "--use-wandb": "`report.trackers=[wandb]`",
    "--seed": "`seed`",
}
"""Ours by flag of slime's command line."""

VERL_CLASSES = {
    "BaseTool": "`mega_agentrl.tool.base.Tool` (docs/own_tool.md)",
    "SearchTool": "the tool `search` (`tool.search`)",
    "SandboxFusionTool": "the built-in tool `python` (`tool.python`)",
    "CustomSandboxFusionTool": "the built-in tool `python` (`tool.python`)",
    "MCPBaseTool": "`tool.mcp`, a file of MCP servers",
    "MCPSearchTool": "`tool.mcp`, a file of MCP servers",
    "ImageZoomInTool": "the tool `zoom` (`tool.zoom.enabled`)",
    "Gsm8kTool": "a reward part of `reward.rubric`, or a tool with calc_reward (docs/own_tool.md)",
    "BaseInteraction": "`mega_agentrl.rollout.interaction.base.Interaction` (docs/own_user.md)",
    "Gsm8kInteraction": "`mega_agentrl.rollout.interaction.gsm8k.Gsm8kInteraction`",
    "AgentLoopBase": "`rollout.agent`, a function or a class (docs/own_agent.md)",
    "AgentLoopOutput": "no object: the gateway records what the policy sampled (docs/own_agent.md)",
    "SingleTurnAgentLoop": "no setting: the native loop without tools",
    "ToolAgentLoop": "no setting: the native loop",
    "NaiveRewardManager": "`reward.functions`",
    "DAPORewardManager": "`reward.functions`",
    "PrimeRewardManager": "`reward.functions`, which run in `reward.num_workers` processes",
    "RLHFDataset": "`data.dataset_class`",
    "register_adv_est": "`mega_agentrl.train.estimators.registry.register_advantage` "
    "(docs/own_algorithm.md)",
    "register_policy_loss": "`mega_agentrl.actor.training.losses.register_loss` "
    "(docs/own_algorithm.md)",
    "default_compute_score": "parts of `reward.rubric` by data source",
}
"""Ours by class or decorator of verl."""

NEMO_RL_CLASSES = {
    "EnvironmentInterface": "`rollout.agent` (docs/own_agent.md), or "
    "`mega_agentrl.rollout.interaction.base.Interaction` (docs/own_user.md)",
    "MathEnvironment": "`reward=accuracy`",
    "RewardModelEnvironment": "`reward.model.path_or_url`",
}
"""Ours by class of NeMo-RL."""

SLIME_CLASSES = {
    "Sample": "no object: the gateway records what the policy sampled (docs/own_agent.md)",
    "generate_rollout": "`rollout.agent`",
}
"""Ours by class or function of slime."""

PEER_KEYS = {"verl": VERL_KEYS, "NeMo-RL": NEMO_RL_KEYS, "slime": SLIME_FLAGS}
PEER_CLASSES = {"verl": VERL_CLASSES, "NeMo-RL": NEMO_RL_CLASSES, "slime": SLIME_CLASSES}
_OUR_SECTIONS = {"data", "reward", "cluster"}
_PACKAGES = {"verl": "verl", "nemo_rl": "NeMo-RL", "slime": "slime"}


def describe_key(key: str) -> str:
    """Return a sentence on what a key or flag of another trainer is called here; else "".

    The first parts of a key may be missing: `rollout.n` is `actor_rollout_ref.rollout.n`.
    """
    for project, names in PEER_KEYS.items():
        exact = key if key in names else _as_flag(key)
        if exact in names:
            return _sentence(project, exact, names[exact])
    for project, names in PEER_KEYS.items():
        for name, ours in names.items():
            is_below = name.endswith(".*") and f"{key}.".startswith(name[:-1])
            is_end = "." in key and name.endswith(f".{key}")
            if is_below or is_end:
                return _sentence(project, key, ours)
    return _describe_section(key.partition(".")[0])


def _describe_section(section: str) -> str:
    """Return a sentence on a section of another trainer that this one does not have; else ""."""
    for project, names in PEER_KEYS.items():
        if section not in _OUR_SECTIONS and any(name.startswith(f"{section}.") for name in names):
            return f"{section} is a section of {project}, docs/from_verl.md has what replaces it"
    return ""


def describe_class(text: str) -> str:
    """Return a sentence on what a class of another trainer is called here; else "".

    Args:
        text: A reference such as `verl.tools.search_tool.SearchTool`, or a line that imports it.
    """
    words = re.findall(r"\w+", text)
    project = next((_PACKAGES[word] for word in words if word in _PACKAGES), "")
    if not project:
        return ""
    names = PEER_CLASSES[project]
    found = next((word for word in reversed(words) if word in names), "")
    if found:
        return _sentence(project, found, names[found])
    return f"{project} is not used here, docs/from_verl.md has the names of its parts"


def _as_flag(key: str) -> str:
    """Return `--a-b` for `--a-b=1` and `a_b`; a word alone, such as `lr`, is not a flag."""
    name = key.partition("=")[0].replace("_", "-")
    return f"--{name}" if "-" in name.strip("-") and not name.startswith("--") else name


def _sentence(project: str, name: str, ours: str) -> str:
    return f"{project}'s {name} is {ours.replace('`', '')} here"
