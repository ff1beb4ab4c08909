"""Golden classifiers of transformers and PEFT on the checkpoints of decoders.py, in golden/classifiers/<name>/, and torch's weighted and
smoothed cross-entropy in golden/classifiers/loss.json.

`qwen2` is a complete classifier as transformers 5 saves it, `qwen3` the same as `pytorch_model.bin` with `label_mapping.json`, `qwen3-peft` PEFT's
adapter for sequence classification with the head in `modules_to_save`. `golden.json` contains texts of different lengths as token ids, and the
logits of all in one padded batch.
"""

import json
import shutil
import warnings

from common import GOLDEN, generator, write_json
import torch
import torch.nn.functional as F
from peft import LoraConfig, PeftModel, TaskType, get_peft_model
from transformers import AutoModelForSequenceClassification
from transformers.utils.logging import disable_progress_bar

disable_progress_bar()
warnings.filterwarnings("ignore", category=UserWarning, module="peft")

LABELS = ["售前", "售后", "诚实", "有帮助", "无伤害"]
PAD_ID, VOCAB = 0, 64
LENGTHS = (7, 1, 12, 3, 7)
FOLDER = GOLDEN / "classifiers"


def texts(name, rng):
    """Token ids. For complete models the third text ends with the padding id, whose hidden state transformers does not use; the config.json of the
    adapter's base has no padding id."""
    found = [torch.randint(3, VOCAB, (length,), generator=rng).tolist() for length in LENGTHS]
    if not name.endswith("peft"):
        found[2][-1] = PAD_ID
    found[4][:3] = found[0][:3]
    return found


def logits(model, rows):
    width = max(map(len, rows))
    input_ids = torch.tensor([row + [PAD_ID] * (width - len(row)) for row in rows])
    mask = torch.tensor([[int(t < len(row)) for t in range(width)] for row in rows])
    with torch.no_grad():
        return model.eval()(input_ids=input_ids, attention_mask=mask).logits


def load(base):
    names = dict(enumerate(LABELS))
    return AutoModelForSequenceClassification.from_pretrained(
        GOLDEN / "decoders" / base,
        num_labels=len(LABELS),
        id2label=names,
        label2id={label: id for id, label in names.items()},
        problem_type="single_label_classification",
        pad_token_id=PAD_ID,
        attn_implementation="eager",
        dtype=torch.float32,
    )


def new_folder(name):
    directory = FOLDER / name
    shutil.rmtree(directory, ignore_errors=True)
    directory.mkdir(parents=True)
    return directory


def write_golden(directory, model, rng):
    rows = texts(directory.name, rng)
    write_json(directory / "golden.json", {"texts": rows, "logits": logits(model, rows)})


def whole(name, base, seed):
    directory, rng = new_folder(name), generator(seed)
    model = load(base)
    model.score.weight.data = torch.randn(model.score.weight.shape, generator=rng) * 0.3
    model.save_pretrained(directory)
    if name == "qwen3":
        (directory / "model.safetensors").unlink()
        torch.save(model.state_dict(), directory / "pytorch_model.bin")
        mapping = {
            "id_to_label": {str(id): label for id, label in enumerate(LABELS)},
            "label_to_id": {label: id for id, label in enumerate(LABELS)},
        }
        (directory / "label_mapping.json").write_text(json.dumps(mapping, ensure_ascii=False, indent=2), encoding="utf-8")
    else:
        (directory / "model.safetensors").chmod(0o644)
    write_golden(directory, model, rng)


def adapted(name, base, seed):
    directory, rng = new_folder(name), generator(seed)
    settings = LoraConfig(
        task_type=TaskType.SEQ_CLS, r=4, lora_alpha=8, target_modules=["q_proj", "v_proj", "down_proj"], modules_to_save=["score"]
    )
    model = get_peft_model(load(base), settings)
    for parameter_name, parameter in model.named_parameters():
        if "lora_" in parameter_name or "modules_to_save" in parameter_name:
            parameter.data = torch.randn(parameter.shape, generator=rng) * 0.3
    model.save_pretrained(directory)
    (directory / "README.md").unlink(missing_ok=True)
    file = directory / "adapter_config.json"
    settings = json.loads(file.read_text())
    settings["base_model_name_or_path"] = base
    settings["target_modules"] = sorted(settings["target_modules"])  # PEFT writes a set in arbitrary order
    file.write_text(json.dumps(settings, indent=2) + "\n")
    mapping = {"id_to_label": dict(enumerate(LABELS)), "label_to_id": {label: id for id, label in enumerate(LABELS)}}
    (directory / "label_mapping.json").write_text(json.dumps(mapping, ensure_ascii=False, indent=2), encoding="utf-8")
    again = PeftModel.from_pretrained(load(base), directory)
    write_golden(directory, again, rng)
    (directory / "adapter_model.safetensors").chmod(0o644)


def losses():
    rng = generator(81)
    scores = torch.randn((6, 4), generator=rng) * 2
    labels, weights = torch.tensor([0, 3, 1, 1, 2, 0]), torch.tensor([0.75, 0.75, 1.5, 1.5])
    cases = []
    for weighted in (False, True):
        for smoothing in (0.0, 0.1):
            leaf = scores.clone().requires_grad_()
            loss = F.cross_entropy(leaf, labels, weight=weights if weighted else None, label_smoothing=smoothing)
            loss.backward()
            cases.append({"weighted": int(weighted), "smoothing": smoothing, "loss": loss, "grad": leaf.grad})
    teacher, some = torch.randn((6, 4), generator=rng) * 2, [0, 3, None, 1, None, 0]
    golden = {"logits": scores, "labels": labels, "weights": weights, "cases": cases, "teacher": teacher, "some_labels": some}
    golden["distillation"] = [distilled(scores, teacher, some, *setting) for setting in ((1.0, 0.5), (2.0, 0.3), (4.0, 0.0))]
    write_json(FOLDER / "loss.json", golden)


def distilled(scores, teacher, labels, temperature, hard_weight):
    leaf = scores.clone().requires_grad_()
    student, target = F.log_softmax(leaf / temperature, dim=-1), F.softmax(teacher / temperature, dim=-1)
    soft = F.kl_div(student, target, reduction="none").sum(-1) * temperature**2
    rows = []
    for index, label in enumerate(labels):
        hard = 0 if label is None else F.cross_entropy(leaf[index], torch.tensor(label))
        rows.append(soft[index] if label is None else hard_weight * hard + (1 - hard_weight) * soft[index])
    loss = torch.stack(rows).mean()
    loss.backward()
    return {"temperature": temperature, "hard_weight": hard_weight, "loss": loss, "grad": leaf.grad}


if __name__ == "__main__":
    whole("qwen2", "qwen2-untied", 71)
    whole("qwen3", "qwen3-tied", 72)
    adapted("qwen3-peft", "qwen3-tied", 73)
    losses()
