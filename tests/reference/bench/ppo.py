"""One iteration of TRL's PPOTrainer: rollout, reference, values, 4 epochs of updates, with a reward that takes no time.

TRL 1.12.0, the last release with the trainer, from .ppo (run.py adds it to the path). The policy is the initial adapter on the frozen base, the
reference is the base itself, and the critic is a second copy of the base with an adapter and a value head, as in querl. `value = "full"` trains
all weights of the critic; `"shared"` makes its frozen weights share memory with the policy's.
"""

import tempfile
import types
import warnings
from pathlib import Path

from common import DTYPES, Stopwatch, WORK, load_model, now, options, report, rows, with_adapter
from prepare import LORA
import torch
from datasets import Dataset
from peft import LoraConfig, inject_adapter_in_model
from transformers import AutoModelForSequenceClassification, AutoTokenizer, TrainerCallback, logging
from trl.experimental.ppo import PPOConfig, PPOTrainer

warnings.filterwarnings("ignore")
logging.set_verbosity_error()

SETTINGS = {
    "lora": {},
    "lora-16": {"batch": 16},
    "lora-64": {"batch": 64},
    "lora-checkpointing": {"checkpointing": 1},
    "lora-shared": {"value": "shared"},
    "full-value": {"value": "full"},
}


class Nothing(torch.nn.Module):
    """A reward model without computation: the reward is 0.5 for every response."""

    def forward(self, input_ids, **_):
        return types.SimpleNamespace(hidden_states=[torch.full((*input_ids.shape, 1), 0.5)])


class ConstantReward(torch.nn.Module):
    base_model_prefix = "model"

    def __init__(self):
        super().__init__()
        self.model, self.score = Nothing(), torch.nn.Identity()


class Clock(TrainerCallback):
    def __init__(self):
        self.ends = []

    def on_train_begin(self, *_, **__):
        self.ends.append(now())

    def on_step_end(self, *_, **__):
        self.ends.append(now())


def critic(settings, policy):
    model = AutoModelForSequenceClassification.from_pretrained(
        settings.model, num_labels=1, dtype=DTYPES[settings.dtype], attn_implementation=settings.attn
    )
    if settings.value == "full":
        return model
    inject_adapter_in_model(LoraConfig(**{**LORA, "task_type": None}), model.model)
    for name, parameter in model.named_parameters():
        parameter.requires_grad_("lora_" in name or name.startswith("score."))
        if parameter.requires_grad:
            parameter.data = parameter.data.float() if "lora_" in name else parameter.data
    if settings.value == "shared":
        share_frozen(policy, model)
    return model


def share_frozen(policy, value_model):
    """Replaces the critic's frozen weights by those of the policy, without a copy."""
    of_policy = {name.split("base_model.model.")[-1]: p for name, p in policy.named_parameters() if not p.requires_grad}
    for name, parameter in value_model.named_parameters():
        if name in of_policy and not parameter.requires_grad:
            parameter.data = of_policy[name].data


def config(settings, n_episodes):
    return PPOConfig(
        output_dir=tempfile.mkdtemp(prefix="ppo-"),
        total_episodes=n_episodes * settings.repeats,
        per_device_train_batch_size=settings.batch,
        gradient_accumulation_steps=n_episodes // settings.batch,
        num_mini_batches=max(1, n_episodes // settings.mini_batch),
        local_rollout_forward_batch_size=settings.forward,
        num_ppo_epochs=4,
        num_sample_generations=0,
        response_length=settings.max_new,
        stop_token="eos",
        temperature=1.0,
        learning_rate=1e-5,
        max_grad_norm=0.5,
        gradient_checkpointing=bool(settings.checkpointing),
        bf16=bool(settings.autocast),
        save_strategy="no",
        report_to="none",
        disable_tqdm=True,
        use_cpu=True,
        dataloader_pin_memory=False,
        logging_steps=1,
        seed=0,
    )


def main():
    settings = options(
        __doc__.splitlines()[0],
        data=str(WORK / "prompts.json"), name="", n=4, max_new=32, repeats=2, limit=0, batch=32, mini_batch=64, forward=128,
        attn="sdpa", value="lora", checkpointing=0, autocast=0,
    )  # fmt: skip
    vars(settings).update(SETTINGS.get(settings.name, {}))
    torch.manual_seed(0)
    policy = with_adapter(load_model(settings, settings.attn), Path(settings.model) / "adapter")
    prompts = [prompt for prompt in rows(settings.data)[: settings.limit or None] for _ in range(settings.n)]
    settings.batch = min(settings.batch, len(prompts))
    tokenizer = AutoTokenizer.from_pretrained(settings.model, padding_side="left")
    clock = Clock()
    trainer = PPOTrainer(
        args=config(settings, len(prompts)),
        processing_class=tokenizer,
        model=policy,
        ref_model=None,
        reward_model=ConstantReward(),
        value_model=critic(settings, policy),
        train_dataset=Dataset.from_dict({"input_ids": prompts}),
        callbacks=[clock],
    )
    trainer.train()
    stopwatch = Stopwatch()
    for start, end in zip(clock.ends, clock.ends[1:]):
        stopwatch.add(start, end)
    report(stopwatch, n_episodes=len(prompts))


if __name__ == "__main__":
    main()
