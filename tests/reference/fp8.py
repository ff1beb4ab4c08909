"""8-bit floats (e4m3) as converted by torch: golden/fp8.json."""

from common import GOLDEN, write_json
import torch

numbers = torch.arange(127, dtype=torch.uint8).view(torch.float8_e4m3fn).to(torch.float32)
middles = (numbers[1:] + numbers[:-1]) / 2  # exact in f32: ties
random = torch.empty(64).uniform_(-448, 448, generator=torch.Generator().manual_seed(1))
small = torch.empty(32).uniform_(-0.02, 0.02, generator=torch.Generator().manual_seed(2))
values = torch.cat([numbers, -numbers[1:], middles, -middles, random, small])
golden = {
    "numbers": numbers.tolist(),  # the values of the codes 0 to 126
    "values": values.tolist(),
    "codes": values.to(torch.float8_e4m3fn).view(torch.uint8).tolist(),
}
write_json(GOLDEN / "fp8.json", golden)
