"""The names of the keys that Trinity-RFT had from version 0.2 to 0.5, by section."""

FIELD_KEYS = {
    "": "mode project group name checkpoint_root_dir checkpoint_job_dir ray_namespace continue_from_checkpoint "
    "ignore_validator_suggestions algorithm data_processor model cluster buffer explorer trainer monitor synchronizer "
    "service log stages algorithm_type",
    "algorithm": "algorithm_type repeat_times optimizer sample_strategy sample_strategy_args advantage_fn "
    "advantage_fn_args kl_penalty_fn kl_penalty_fn_args policy_loss_fn policy_loss_fn_args kl_loss_fn kl_loss_fn_args "
    "entropy_loss_fn entropy_loss_fn_args loss_agg_mode enable_router_replay bypass_old_logprobs rollout_correction "
    "add_strategy add_strategy_args use_token_level_loss gamma lam mu",
    "algorithm.optimizer": "lr lr_warmup_steps lr_warmup_steps_ratio min_lr_ratio warmup_style lr_scheduler_type "
    "optimizer_type betas weight_decay clip_grad lr_warmup_init lr_decay_steps lr_decay_style min_lr",
    "model": "model_path trust_remote_code critic_model_path custom_chat_template chat_template_path temperature top_p "
    "top_k logprobs max_model_len max_prompt_tokens max_response_tokens min_response_tokens enable_prompt_truncation "
    "repetition_penalty enable_thinking lora_configs fully_sharded_loras max_cpu_loras rope_scaling rope_theta tinker "
    "external_model checkpoint_path",
    "cluster": "ray_address node_num gpu_per_node total_gpu_num rollout_gpu_num auxiliary_model_gpu_num "
    "explorer_gpu_num trainer_gpu_num trainer_node_num trainer_gpu_num_per_node",
    "buffer": "batch_size train_batch_size total_epochs total_steps explorer_input trainer_input explorer_output "
    "tokenizer_path pad_token_id cache_dir max_retry_times max_retry_interval read_batch_size sft_batch_size "
    "explore_batch_size expert_data_ratio train_dataset sft_warmup_dataset",
    "buffer.explorer_input": "taskset tasksets eval_tasksets default_workflow_type default_eval_workflow_type "
    "default_reward_fn_type system_prompt reply_prefix",
    "buffer.explorer_input.taskset": "name storage_type path default_workflow_type default_reward_fn_type rollout_args "
    "workflow_args reward_fn_args task_selector data_selector split subset_name format max_retry_times "
    "max_retry_interval enable_progress_bar repeat_times index is_eval batch_size total_epochs total_steps "
    "ray_namespace default_eval_workflow_type algorithm_type task_type mm_data_kwargs wrap_in_ray schema_type raw "
    "capacity max_read_timeout use_priority_queue reuse_cooldown_time replay_buffer replay_buffer_kwargs "
    "tokenizer_path",
    "buffer.explorer_input.taskset.format": "prompt_type prompt_key response_key system_prompt_key system_prompt "
    "messages_key tools_key image_key video_key reply_prefix workflow_key reward_fn_key chosen_key rejected_key "
    "enable_concatenated_multi_turn chat_template enable_thinking teacher_hint_key solution_key reward_key label_key",
    "buffer.explorer_input.taskset.rollout_args": "temperature top_p top_k logprobs max_tokens n",
    "buffer.explorer_input.taskset.task_selector": "selector_type seed random_method feature_keys kwargs",
    "buffer.trainer_input": "experience_buffer auxiliary_buffers sft_warmup_dataset sft_warmup_steps "
    "read_experience_strategy",
    "buffer.trainer_input.experience_buffer": "name storage_type path capacity max_read_timeout replay_buffer "
    "max_retry_times max_retry_interval split subset_name format enable_progress_bar data_selector schema_type index "
    "batch_size tokenizer_path total_epochs total_steps ray_namespace use_priority_queue reuse_cooldown_time "
    "replay_buffer_kwargs wrap_in_ray algorithm_type repeat_times default_workflow_type default_eval_workflow_type "
    "default_reward_fn_type rollout_args workflow_args reward_fn_args task_selector is_eval task_type raw "
    "mm_data_kwargs",
    "buffer.trainer_input.experience_buffer.replay_buffer": "enable priority_fn reuse_cooldown_time priority_fn_args",
    "explorer": "name mode runner_per_model runner_prepare_concurrency runner_prepare_max_retries max_timeout "
    "max_retry_times env_vars concurrent_mode max_repeat_times_per_runner runner_num rollout_model auxiliary_models "
    "eval_interval eval_on_startup bench_on_latest_checkpoint proxy_port listen_address service_status_check_interval "
    "min_running_model_num db_url runner_state_report_interval max_inflight_batches "
    "collect_experiences eval_on_latest_checkpoint engine_type engine_num tensor_parallel_size enable_prefix_caching "
    "enforce_eager dtype temperature top_p top_k seed logprobs repeat_times use_ray backend max_pending_requests "
    "max_waiting_steps gpu_memory_utilization enable_chunked_prefill use_v1 enable_thinking chat_template",
    "explorer.rollout_model": "model_path name trust_remote_code engine_type engine_num tensor_parallel_size "
    "data_parallel_size pipeline_parallel_size enable_expert_parallel gpu_per_engine extra_engine_args use_v1 "
    "enforce_eager enable_prefix_caching enable_chunked_prefill gpu_memory_utilization dtype seed temperature top_p "
    "top_k logprobs max_model_len max_prompt_tokens max_response_tokens min_response_tokens enable_prompt_truncation "
    "repetition_penalty ignore_eos enable_multimodal chat_template enable_thinking enable_history enable_openai_api "
    "enable_log_requests base_port api_key enable_auto_tool_choice tool_call_parser reasoning_parser "
    "external_model_config nnodes node_rank enable_return_routed_experts weight_sync_buffer_size bundle_indices "
    "engine_id ray_namespace ray_actor_name sync_method checkpoint_job_dir cuda_visible_devices enable_lora "
    "enable_runtime_lora_updating lora_modules lora_kwargs rope_scaling rope_theta",
    "trainer": "name trainer_type trainer_strategy save_interval enable_preview total_steps save_hf_checkpoint "
    "grad_clip use_dynamic_bsz use_remove_padding balance_batch critic_warmup max_token_len_per_gpu "
    "ppo_max_token_len_per_gpu ulysses_sequence_parallel_size fix_actor_microbatch_loss_scale param_offload "
    "optimizer_offload grad_offload offload_policy save_strategy max_checkpoints_to_keep megatron trust_remote_code "
    "trainer_config trainer_config_path actor_grad_clip actor_use_kl_loss actor_kl_loss_coef actor_entropy_coef "
    "actor_clip_ratio algorithm_type eval_interval sft_warmup_steps sft_warmup_iteration",
    "monitor": "monitor_type monitor_args detailed_stats enable_ray_timeline cache_dir cache_root_dir project name",
    "synchronizer": "sync_method sync_style sync_interval explorer_sync_interval trainer_sync_interval sync_offset "
    "sync_timeout group_name wait_for_checkpoint explorer_world_size ray_namespace sync_iteration_interval",
    "service.data_juicer": "server_url auto_start port",
    "log": "level group_by_node save_dir",
    "data_processor": "task_pipeline experience_pipeline data_processor_url data_workflow_url source_data_path format "
    "load_kwargs dj_config_path dj_process_desc agent_model_name agent_model_config clean_strategy min_size_ratio "
    "min_priority_score priority_weights data_dist db_url max_retry_times max_retry_interval",
    "data_processor.task_pipeline": "operators num_process config_path inputs output target_fields priority_weights "
    "top_k input_buffers output_buffer format dj_config_path dj_process_desc agent_model_name clean_strategy "
    "min_size_ratio min_priority_score data_dist reward_shaping dynamic",
    "data_processor.experience_pipeline": "operators save_input input_save_path inputs output",
}
