"""querl's dropout masks in place of PEFT's. They depend on the seed, the layer, and the tokens of a row up to a position.

Random numbers are from SplitMix64 (Steele, Lea and Flood 2014). The key of a position is computed from the previous key and the token; the stream
of a layer starts with a mix of key and layer, and each 64 bits decide on two adjacent inputs.
"""

import torch

BITS = 2**64 - 1
STEP = 0x9E3779B97F4A7C15


def mix(z):
    z = (z ^ (z >> 30)) * 0xBF58476D1CE4E5B9 & BITS
    z = (z ^ (z >> 27)) * 0x94D049BB133111EB & BITS
    return z ^ (z >> 31)


def row_key(parent, token):
    return mix((parent + STEP & BITS) ^ ((token + 1) * STEP & BITS))


def layer_seed(seed, path):
    state = mix(seed)
    for byte in path.encode():
        state = row_key(state, byte)
    return state


def mask(key, layer, width, probability):
    """The factor of each input of a row."""
    threshold, state, factors = int(probability * (2**32 - 1)), mix(key ^ layer), []
    while len(factors) < width:
        state = state + STEP & BITS
        bits = mix(state)
        factors += [0.0 if half < threshold else 1 / (1 - probability) for half in (bits & (2**32 - 1), bits >> 32)]
    return factors[:width]


class Masked(torch.nn.Module):
    """Multiplies each row of a batch `(B, T, in)` by its own mask."""

    def __init__(self, keys, layer, probability):
        super().__init__()
        self.keys, self.layer, self.probability = keys, layer, probability

    def forward(self, x):
        rows = [[mask(key, self.layer, x.shape[-1], self.probability) for key in keys] for keys in self.keys]
        return x * torch.tensor(rows)


def use_masks(model, probability, seed, input_ids):
    """Sets a PEFT model to training mode with these masks for this batch."""
    keys = []
    for tokens in input_ids.tolist():
        row = [0]
        for token in tokens:
            row.append(row_key(row[-1], token))
        keys.append(row[1:])
    for name, module in model.named_modules():
        if hasattr(module, "lora_dropout"):
            path = name.removeprefix("base_model.model.")
            module.lora_dropout["default"] = Masked(keys, layer_seed(seed, path), probability)
    model.train()
