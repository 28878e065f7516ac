"""Command lines for tests: a complete one, and what each flag of Megatron's users means or why it is refused."""

from __future__ import annotations

BASE = (
    "--num-layers 4 --hidden-size 64 --num-attention-heads 4 --seq-length 32 --max-position-embeddings 32 "
    "--micro-batch-size 2 --global-batch-size 16 --train-iters 10 --lr 1e-3 --mock-data --tokenizer-type NullTokenizer "
    "--vocab-size 100"
)

# The same without the length of the run, the data, and the tokenizer.
SAMPLES = "--num-layers 4 --hidden-size 64 --num-attention-heads 4 --seq-length 32 --micro-batch-size 2 --lr 1e-3"
DATA = "--vocab-size 100 --tokenizer-type NullTokenizer"

# What is typed (the tested flag first) -> section.field=value. `|` adds companions; a leading `!` starts from
# SAMPLES instead of BASE.
TIER_1 = """
--num-layers 8 -> model.num_layers=8
--hidden-size 128 -> model.hidden_size=128
--ffn-hidden-size 200 -> model.ffn_hidden_size=200
--num-attention-heads 8 -> model.num_attention_heads=8
--group-query-attention -> model.num_query_groups=1
--num-query-groups 2 | --group-query-attention -> model.num_query_groups=2
--kv-channels 32 -> model.kv_channels=32
--seq-length 16 -> model.seq_length=16
--max-position-embeddings 64 -> model.max_position_embeddings=64
--position-embedding-type rope -> model.position_embedding_type='rope'
--rotary-base 1000000 -> model.rotary_base=1000000
--rotary-percent 0.25 -> model.rotary_percent=0.25
--use-rope-scaling -> model.use_rope_scaling=True
--rope-scaling-factor 32.0 -> model.rope_scaling_factor=32.0
--normalization RMSNorm -> model.normalization='RMSNorm'
--norm-epsilon 1e-6 -> model.norm_epsilon=1e-6
--swiglu -> model.ffn_hidden_size=128
--disable-bias-linear -> model.add_bias_linear=False
--add-qkv-bias -> model.add_qkv_bias=True
--qk-layernorm -> model.qk_layernorm=True
--untie-embeddings-and-output-weights -> model.untie_embeddings_and_output_weights=True
--make-vocab-size-divisible-by 8 -> model.make_vocab_size_divisible_by=8
--attention-dropout 0.0 -> model.attention_dropout=0.0
--hidden-dropout 0 -> model.hidden_dropout=0.0
--init-method-std 0.006 -> model.init_method_std=0.006
! --data-path 0.3 a 0.7 b | --train-iters 10 -> data.data_path=('0.3', 'a', '0.7', 'b')
! --train-data-path a | --train-iters 10 -> data.train_data_path=('a',)
! --valid-data-path b | --train-data-path a --train-iters 10 -> data.valid_data_path=('b',)
--split 949,50,1 -> data.split='949,50,1'
--data-cache-path /c -> data.data_cache_path='/c'
--mock-data -> data.mock_data=True
--tokenizer-type HuggingFaceTokenizer -> data.tokenizer_type='HuggingFaceTokenizer'
--tokenizer-model /t -> data.tokenizer_model='/t'
--vocab-size 50257 -> data.vocab_size=50257
--vocab-file v.json -> data.vocab_file='v.json'
--merge-file m.txt -> data.merge_file='m.txt'
--num-workers 8 -> data.num_workers=8
--eod-mask-loss -> data.eod_mask_loss=True
--micro-batch-size 4 -> batch.micro_batch_size=4
--global-batch-size 32 -> batch.global_batch_size=32
--train-iters 500 -> batch.train_iters=500
! --train-samples 500 | --mock-data -> batch.train_samples=500
--step-batch-size-schedule 0:8,2K:16 -> batch.step_batch_size_schedule='0:8,2K:16'
--seed 42 -> lifecycle.seed=42
--optimizer adam -> optim.optimizer='adam'
--weight-decay 0.1 -> optim.weight_decay=0.1
--adam-beta1 0.8 -> optim.adam_beta1=0.8
--adam-beta2 0.95 -> optim.adam_beta2=0.95
--adam-eps 1e-5 -> optim.adam_eps=1e-5
--clip-grad 0 -> optim.clip_grad=0.0
--use-distributed-optimizer -> parallel.use_distributed_optimizer=True
--overlap-grad-reduce -> parallel.overlap_grad_reduce=True
--overlap-param-gather | --overlap-grad-reduce -> parallel.overlap_param_gather=True
--use-precision-aware-optimizer -> note
--lr 6.0e-5 -> lr.lr=6e-5
--min-lr 1e-5 -> lr.min_lr=1e-5
--lr-decay-style cosine -> lr.lr_decay_style='cosine'
--lr-decay-iters 8 -> lr.lr_decay_iters=8
! --lr-decay-samples 400 | --train-samples 500 --mock-data -> lr.lr_decay_samples=400
--lr-warmup-iters 2 -> lr.lr_warmup_iters=2
! --lr-warmup-samples 40 | --train-samples 500 --mock-data -> lr.lr_warmup_samples=40
--lr-warmup-fraction .01 -> lr.lr_warmup_fraction=0.01
--override-opt_param-scheduler -> checkpoint.override_opt_param_scheduler=True
--override-opt-param-scheduler -> checkpoint.override_opt_param_scheduler=True
--use-checkpoint-opt_param-scheduler -> checkpoint.use_checkpoint_opt_param_scheduler=True
--use-checkpoint-opt-param-scheduler -> checkpoint.use_checkpoint_opt_param_scheduler=True
--bf16 -> precision.accumulate_allreduce_grads_in_fp32=True
--fp16 -> precision.fp16=True
--accumulate-allreduce-grads-in-fp32 | --fp16 -> precision.accumulate_allreduce_grads_in_fp32=True
--attention-softmax-in-fp32 -> precision.attention_softmax_in_fp32=True
--tensor-model-parallel-size 2 -> parallel.tensor_model_parallel_size=2
--pipeline-model-parallel-size 2 -> parallel.pipeline_model_parallel_size=2
--sequence-parallel | --tensor-model-parallel-size 2 -> parallel.sequence_parallel=True
--save out | --save-interval 5 -> checkpoint.save='out'
--load out -> checkpoint.load='out'
--save-interval 5 -> checkpoint.save_interval=5
--ckpt-format torch_dist -> checkpoint.ckpt_format='torch_dist'
--no-load-optim -> checkpoint.no_load_optim=True
--no-load-rng -> checkpoint.no_load_rng=True
--no-save-optim -> checkpoint.no_save_optim=True
--finetune -> checkpoint.finetune=True
--use-checkpoint-args | --load out -> checkpoint.use_checkpoint_args=True
--exit-on-missing-checkpoint -> checkpoint.exit_on_missing_checkpoint=True
--log-interval 1 -> logging.log_interval=1
--eval-interval 50 -> logging.eval_interval=50
--eval-iters 0 -> logging.eval_iters=0
--tensorboard-dir tb -> logging.tensorboard_dir='tb'
--log-throughput -> logging.log_throughput=True
--log-params-norm -> logging.log_params_norm=True
--log-timers-to-tensorboard -> logging.log_timers_to_tensorboard=True
--wandb-project p | --wandb-exp-name e -> logging.wandb_project='p'
--wandb-exp-name e -> logging.wandb_exp_name='e'
--distributed-timeout-minutes 60 -> parallel.distributed_timeout_minutes=60
--exit-duration-in-mins 235 -> lifecycle.exit_duration_in_mins=235
--exit-signal-handler -> lifecycle.exit_signal_handler=True
--recompute-activations -> recompute.recompute_granularity='selective'
--recompute-granularity full | --recompute-method uniform -> recompute.recompute_num_layers=1
--recompute-method block | --recompute-granularity full --recompute-num-layers 1 -> recompute.recompute_method='block'
--recompute-num-layers 2 | --recompute-granularity full --recompute-method block -> recompute.recompute_num_layers=2
--optimizer-cpu-offload -> offload.interleaved_offload=True
--optimizer-offload-fraction 0.5 | --optimizer-cpu-offload -> offload.offload_resident_fraction=0.5
--overlap-cpu-optimizer-d2h-h2d -> note
--interleaved-offload -> offload.interleaved_offload=True
"""

TIER_2 = """
--use-mcore-models -> note
--transformer-impl transformer_engine -> model.transformer_impl='transformer_engine'
--attention-backend flash -> note
--use-flash-attn -> note
--no-masked-softmax-fusion -> note
--no-bias-swiglu-fusion -> note
--no-bias-gelu-fusion -> model.bias_gelu_fusion=False
--no-bias-dropout-fusion -> note
--no-rope-fusion -> note
--no-gradient-accumulation-fusion -> note
--no-persist-layer-norm -> note
--cross-entropy-loss-fusion -> note
--tp-comm-overlap -> note
--apply-query-key-layer-scaling -> note
--use-rotary-position-embeddings -> model.position_embedding_type='rope'
--no-position-embedding | --position-embedding-type rope -> note
--rotary-seq-len-interpolation-factor 2 -> model.rotary_seq_len_interpolation_factor=2
--rotary-interleaved -> model.rotary_interleaved=True
--squared-relu -> model.squared_relu=True
--window-size 4095,0 -> model.window_size=(4095, 0)
--apply-layernorm-1p -> model.apply_layernorm_1p=True
! --test-data-path c | --train-data-path a --train-iters 10 -> data.test_data_path=('c',)
--data-args-path list.txt -> data.data_args_path='list.txt'
--dataloader-type cyclic -> data.dataloader_type='cyclic'
--reset-position-ids -> data.reset_position_ids=True
--reset-attention-mask -> data.reset_attention_mask=True
--no-create-attention-mask-in-dataloader -> note
--no-mmap-bin-files -> data.mmap_bin_files=False
--tiktoken-pattern v2 -> data.tiktoken_pattern='v2'
--padded-vocab-size 128 -> data.padded_vocab_size=128
--rampup-batch-size 8 8 60 -> batch.rampup_batch_size=(8, 8, 60)
--lr-wsd-decay-style linear -> lr.lr_wsd_decay_style='linear'
--lr-wsd-decay-iters 3 | --lr-decay-style WSD -> lr.lr_wsd_decay_iters=3
--lr-warmup-init 1e-7 -> lr.lr_warmup_init=1e-7
--decoupled-lr 5e-4 -> lr.decoupled_lr=5e-4
--decoupled-min-lr 5e-5 | --decoupled-lr 5e-4 -> lr.decoupled_min_lr=5e-5
--iterations-to-skip 3 4 -> lifecycle.iterations_to_skip=(3, 4)
--skip-train -> lifecycle.skip_train=True
--grad-reduce-in-bf16 | --bf16 -> precision.grad_reduce_in_bf16=True
--loss-scale 1024 | --fp16 -> precision.loss_scale=1024.0
--initial-loss-scale 65536 | --fp16 -> precision.initial_loss_scale=65536.0
--main-params-dtype fp32 -> note
--main-grads-dtype fp32 -> note
--exp-avg-dtype fp32 -> note
--exp-avg-sq-dtype fp32 -> note
--context-parallel-size 1 -> parallel.context_parallel_size=1
--expert-model-parallel-size 1 -> note
--num-layers-per-virtual-pipeline-stage 1 | --pipeline-model-parallel-size 2 -> batch.global_batch_size=16
--use-tp-pp-dp-mapping -> parallel.use_tp_pp_dp_mapping=True
--async-save -> checkpoint.async_save=True
--use-persistent-ckpt-worker -> note
--ckpt-step 100 -> checkpoint.ckpt_step=100
--save-retain-interval 100 -> checkpoint.save_retain_interval=100
--no-save-rng -> checkpoint.no_save_rng=True
--auto-detect-ckpt-format -> note
--dist-ckpt-strictness log_all -> checkpoint.dist_ckpt_strictness='log_all'
--dist-ckpt-optim-fully-reshardable -> note
--no-ckpt-fully-parallel-save -> checkpoint.ckpt_fully_parallel_save=False
--ckpt-fully-parallel-load -> checkpoint.ckpt_fully_parallel_load=True
--ckpt-fully-parallel-save -> note
--use-dist-ckpt -> note
--dist-ckpt-format torch_dist -> note
--timing-log-level 2 -> logging.timing_log_level=2
--log-num-zeros-in-grad -> logging.log_num_zeros_in_grad=True
--log-validation-ppl-to-tensorboard -> logging.log_validation_ppl_to_tensorboard=True
--log-memory-to-tensorboard -> logging.log_memory_to_tensorboard=True
--tensorboard-queue-size 5 -> logging.tensorboard_queue_size=5
--tensorboard-log-interval 10 -> logging.tensorboard_log_interval=10
--log-progress --save d --save-interval 5 -> logging.log_progress=True
--wandb-save-dir w -> logging.wandb_save_dir='w'
--wandb-entity me -> logging.wandb_entity='me'
--log-batch-size-to-tensorboard -> note
--log-learning-rate-to-tensorboard -> note
--log-loss-scale-to-tensorboard -> note
--exit-interval 100 -> lifecycle.exit_interval=100
--exit-signal SIGUSR1 -> lifecycle.exit_signal='SIGUSR1'
--manual-gc -> lifecycle.manual_gc=True
--manual-gc-interval 50 -> lifecycle.manual_gc_interval=50
--empty-unused-memory-level 1 -> lifecycle.empty_unused_memory_level=1
--no-check-for-nan-in-loss-and-grad -> optim.check_for_nan_in_loss_and_grad=False
--calculate-per-token-loss -> batch.calculate_per_token_loss=True
--deterministic-mode -> lifecycle.deterministic_mode=True
--distributed-backend gloo -> parallel.distributed_backend='gloo'
--local-rank 0 -> note
--rerun-mode validate_results -> lifecycle.rerun_mode='validate_results'
--profile -> lifecycle.profile=True
--profile-step-start 4 -> lifecycle.profile_step_start=4
--profile-step-end 6 -> lifecycle.profile_step_end=6
--profile-ranks 0 1 -> lifecycle.profile_ranks=(0, 1)
--use-torch-optimizer-for-cpu-offload -> note
--no-pin-cpu-grads -> note
--no-pin-cpu-params -> note
--recompute-modules core_attn mlp -> recompute.recompute_modules=('core_attn', 'mlp')
--cpu-offloading-num-layers 4 -> note
--cpu-offloading -> note
! --patch-tokenizer-type Llama | --load m --mock-data --train-iters 10 -> data.tokenizer_type='HuggingFaceTokenizer'
"""

DEEPSPEED = "DeepSpeed is not used: drop it, and let --interleaved-offload place optimizer state"
SHARDED = "state is sharded by the distributed optimizer here: drop it, or see InterleavedAdamW for FSDP2"
TIER_3 = {
    "--fp8-format hybrid": "8-bit and 4-bit training is not built here: use --bf16",
    "--fp8-recipe delayed": "8-bit and 4-bit training is not built here: use --bf16",
    "--num-experts 8": "mixtures of experts are not built here: train a dense model",
    "--moe-router-topk 2": "mixtures of experts are not built here: train a dense model",
    "--multi-latent-attention": "latent attention is not built here: use --group-query-attention",
    "--mtp-num-layers 1": "multi-token prediction is not built here: drop it",
    "--use-megatron-fsdp": SHARDED,
    "--use-torch-fsdp2": SHARDED,
    "--data-parallel-sharding-strategy optim": SHARDED,
    "--optimizer-offload-policy auto": "placement is chosen by --offload-gpu-share and --offload-resident-fraction: "
    "use those",
    "--use-legacy-models": "legacy models were removed from Megatron: drop it",
    "--checkpoint-activations": "it was replaced: use --recompute-granularity full --recompute-method uniform",
    "--batch-size 4": "it was replaced: use --micro-batch-size and --global-batch-size",
    "--warmup 0.01": "it was replaced: use --lr-warmup-fraction",
    "--model-parallel-size 2": "it was replaced: use --tensor-model-parallel-size",
    "--fp8-hybrid": "8-bit and 4-bit training is not built here: use --bf16",
    "--activations-checkpoint-method uniform": "it was replaced: use --recompute-granularity full --recompute-method "
    "uniform",
    "--num-key-value-heads 4": "it has another name: use --group-query-attention --num-query-groups",
    "--no-pipeline-parallel": "it is --pipeline-model-parallel-size 1, the default: drop it",
    "--deepspeed": DEEPSPEED,
    "--deepspeed_config ds.json": DEEPSPEED,
    "--zero-stage 2": DEEPSPEED,
}
