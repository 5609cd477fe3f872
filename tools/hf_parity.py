"""The engine's model against transformers with the same random weights, both on one device.

    transformers' model, random weights --share--> ModelWeights --> EngineModel
    prompt and teacher-forced decode steps through both; the log-probabilities of some rows

The reference's logits are taken in fp32 from its last hidden state: transformers itself rounds
them to bf16, which costs more than what is to be seen. Beside the comparison stands transformers
against itself, with another attention implementation, in a batch of two, the prompt in two pieces.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator
from typing import Any

import numpy as np
import torch
from transformers import DynamicCache, Qwen3_5ForCausalLM
from transformers.models.qwen3_5.configuration_qwen3_5 import Qwen3_5TextConfig

from deltaserve.engine.config import ModelConfig
from deltaserve.engine.models.weights_layout import ModelWeights
from deltaserve.engine.tensor_names import PackedArray, map_arrays, packed_layout
from tools.engine_model import EngineModel
from tools.golden_gate import MAX_MEAN, MAX_P99, MAX_REGRET, TOP
from tools.hf_mistakes import made, mistakes_for

DECODE_STEPS = 8
PROMPT_ROWS = 16
LOGITS_STD = 3.2
BLOCKS_SHARE = 0.25
MAX_RMS_RATIO = 1.5

_BLOCK_STD = 0.5  # of a block's output where its last matrix keeps the variance of its input
_HEAD_SLICE = 16384


def random_model(config: dict[str, Any], device: str, seed: int) -> Qwen3_5ForCausalLM:
    """transformers' model in bf16 with random weights that can show mistakes: norms, A_log and
    dt_bias are random, and logits vary by LOGITS_STD.

    All blocks together add BLOCKS_SHARE times the variance of the embedding to the residual stream:
    where each adds as much as its input, a deep random model turns rounding into noise that hides
    what is compared. The final norm's factors have random signs, so that a tied head does not
    just find the input token again.
    """
    previous = torch.get_default_dtype()
    torch.set_default_dtype(torch.bfloat16)
    try:
        with torch.device(device):
            model = Qwen3_5ForCausalLM(Qwen3_5TextConfig(**config)).eval()
    finally:
        torch.set_default_dtype(previous)
    model.tie_weights()
    generator = torch.Generator(device=device).manual_seed(seed)
    embed_std = LOGITS_STD / config["hidden_size"] ** 0.5
    num_blocks = 2 * config["num_hidden_layers"]
    block_std = embed_std * (BLOCKS_SHARE / num_blocks) ** 0.5 / _BLOCK_STD
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if name.endswith("A_log"):
                parameter.uniform_(-4.0, 1.0, generator=generator)
            elif name.endswith("dt_bias"):
                parameter.uniform_(-3.0, 1.0, generator=generator)
            elif name.endswith("norm.weight"):  # all but the gated one multiply by 1 + w
                parameter.normal_(0.0, 0.2, generator=generator)
                if name.endswith("linear_attn.norm.weight"):
                    parameter.add_(1.0)
                elif name == "model.norm.weight":
                    signs = torch.empty_like(parameter).uniform_(-1.0, 1.0, generator=generator)
                    parameter.copy_((parameter + 1.0) * signs.sign() - 1.0)
            else:
                parameter.normal_(generator=generator)
                if name == "lm_head.weight" or "embed_tokens" in name:
                    parameter.mul_(embed_std)
                elif "conv1d" in name:
                    parameter.mul_(0.4)
                elif name.endswith(("o_proj.weight", "out_proj.weight", "down_proj.weight")):
                    parameter.mul_(block_std * parameter.shape[1] ** -0.5)
                else:
                    parameter.mul_(parameter.shape[1] ** -0.5)
    return model


def shared_weights(model: Qwen3_5ForCausalLM, config: ModelConfig) -> ModelWeights:
    """The model's tensors packed for the engine, on its device, shared where the packing allows:
    the model has to live as long as they do."""
    tensors = {name: p.detach() for name, p in model.named_parameters()}
    made: dict[PackedArray, Any] = {}

    def leaf(array: PackedArray) -> Any:
        if array not in made:
            made[array] = _backend_array(_packed(array, tensors), array.fp32)
        return made[array]

    weights: ModelWeights = map_arrays(packed_layout(config, "model."), leaf)
    if model.device.type == "cuda":
        torch.cuda.synchronize()
    return weights


def _packed(array: PackedArray, tensors: dict[str, torch.Tensor]) -> torch.Tensor:
    first = tensors[array.pieces[0].name]
    if len(array.pieces) == 1 and len(array.pieces[0].copies) == 1:
        packed = first.reshape(array.shape)
    else:
        packed = torch.empty(array.shape, dtype=first.dtype, device=first.device)
        for piece in array.pieces:
            source = tensors[piece.name].reshape(-1, *array.shape[1:])
            assert tuple(tensors[piece.name].shape) == piece.shape, piece.name
            for copy in piece.copies:
                rows = source[copy.source : copy.source + copy.count]
                packed[copy.target : copy.target + copy.count] = rows
    return packed.float() if array.fp32 else packed


def _backend_array(tensor: torch.Tensor, fp32: bool) -> Any:
    tensor = tensor.contiguous()
    if tensor.device.type == "cpu":
        return tensor.float().numpy()
    import cupy
    import ml_dtypes

    if fp32:
        return cupy.asarray(tensor)
    return cupy.asarray(tensor.view(torch.int16)).view(np.dtype(ml_dtypes.bfloat16))


def prompt_rows(length: int) -> list[int]:
    """Positions of the prompt whose logits are compared: some, spread over it, and the last."""
    return sorted({round(x) for x in np.linspace(0, length - 1, min(PROMPT_ROWS, length))})


@torch.no_grad()
def reference_logits(
    model: Qwen3_5ForCausalLM, ids: list[int], length: int, *, other_way: bool = False
) -> torch.Tensor:
    """fp32 [rows, vocab]: `prompt_rows(length)`, then the tokens after them as decode steps.
    `other_way`: see the module."""
    model.set_attn_implementation("eager" if other_way else "sdpa")
    device = model.lm_head.weight.device
    tokens = torch.tensor([ids] * (2 if other_way else 1), device=device)
    cut = length // 2 + 1 if other_way and length > 2 else length
    ends = [end for end in (cut, length) if end <= length]
    cache = DynamicCache(config=model.config)
    hidden, start = [], 0
    for end in [*dict.fromkeys(ends), *range(length + 1, len(ids) + 1)]:
        out = model.model(input_ids=tokens[:, start:end], past_key_values=cache, use_cache=True)
        hidden.append(out.last_hidden_state[0])
        start = end
    wanted = [*prompt_rows(length), *range(length, len(ids))]
    rows = torch.cat(hidden)[torch.tensor(wanted, device=device)].float()
    head = model.lm_head.weight
    parts = [
        rows @ head[i : i + _HEAD_SLICE].float().T for i in range(0, head.shape[0], _HEAD_SLICE)
    ]
    return torch.cat(parts, dim=1)


def engine_logits(model: EngineModel, ids: list[int], length: int) -> torch.Tensor:
    """As `reference_logits`, by the engine's model in its slot 0."""
    if torch.cuda.is_available():
        torch.cuda.synchronize()
    outputs = [model.prefill(0, ids[:length], 0, length, prompt_rows(length))]
    outputs += [model.decode([(0, ids[p], p)]) for p in range(length, len(ids))]
    return torch.cat([_tensor(output) for output in outputs])


def _tensor(logits: Any) -> torch.Tensor:
    if isinstance(logits, np.ndarray):
        return torch.from_numpy(logits)
    import cupy

    cupy.cuda.Device().synchronize()
    return torch.as_tensor(logits, device="cuda").clone()


def compare(found: torch.Tensor, expected: torch.Tensor) -> dict[str, float]:
    """Over the reference's TOP ids of every row: |d logprob|, and what it loses by our argmax."""
    found_logprobs, logprobs = found.log_softmax(-1), expected.log_softmax(-1)
    top = logprobs.topk(TOP, dim=-1).indices
    difference = (found_logprobs.gather(1, top) - logprobs.gather(1, top)).abs().flatten()
    best = logprobs.gather(1, logprobs.argmax(-1, keepdim=True))
    ours = logprobs.gather(1, found.argmax(-1, keepdim=True))
    error = (found - expected).double().pow(2).mean().sqrt()
    values = {
        "mean": difference.mean(),
        "p99": difference.quantile(0.99),
        "regret": (best - ours).max(),
        "rms": error / expected.double().pow(2).mean().sqrt(),
        "same_argmax": (found.argmax(-1) == expected.argmax(-1)).float().mean(),
        "logits_std": expected.std(dim=-1).mean(),
    }
    return {name: float(value) for name, value in values.items()}


def _near(ours: float, itself: float, from_fp32: dict[str, float]) -> bool:
    """The rms criterion. What both models round alike cancels when transformers is compared with
    itself and not against us, so where there is an fp32 reference we may also be as near to that
    as transformers is."""
    if ours <= MAX_RMS_RATIO * itself:
        return True
    return bool(from_fp32) and (from_fp32["ours"] <= MAX_RMS_RATIO * from_fp32["transformers"])


def passes(ours: dict[str, float], itself: dict[str, float], from_fp32: dict[str, float]) -> bool:
    """The gate. `itself`: the reference compared with itself; `from_fp32` may be empty."""
    return (
        ours["mean"] <= MAX_MEAN
        and ours["p99"] <= MAX_P99
        and ours["regret"] <= MAX_REGRET
        and _near(ours["rms"], itself["rms"], from_fp32)
        and ours["logits_std"] >= 3.0
    )


def mistake_rows(
    reference: Qwen3_5ForCausalLM, model: EngineModel, length: int, seed: int
) -> Iterator[dict[str, Any]]:
    """The gate with each mistake of `hf_mistakes` in the reference; `ok` where it fails."""
    rng = np.random.default_rng([seed, length])
    ids = rng.integers(0, model.config.vocab_size, length + DECODE_STEPS).tolist()
    expected = reference_logits(reference, ids, length)
    itself = compare(reference_logits(reference, ids, length, other_way=True), expected)
    found = engine_logits(model, ids, length)
    logits_std = compare(found, expected)["logits_std"]
    wrong = copy.deepcopy(reference)
    for mistake in mistakes_for(reference):
        with made(mistake, wrong, reference) as mistaken:
            values = compare(found, reference_logits(mistaken, ids, length))
        # the mistake is to be seen in what is compared, not in the logits having become small
        seen = not passes({**values, "logits_std": logits_std}, itself, {})
        yield {"mistake": mistake.__name__, **values, "ok": seen}


def parity_row(
    reference: Qwen3_5ForCausalLM,
    exact: Qwen3_5ForCausalLM | None,
    model: EngineModel,
    length: int,
    seed: int,
) -> dict[str, Any]:
    """One prompt of random ids through both; `ok` is the gate. `exact`: the reference in fp32,
    which both are compared with too."""
    rng = np.random.default_rng([seed, length])
    ids = rng.integers(0, model.config.vocab_size, length + DECODE_STEPS).tolist()
    expected = reference_logits(reference, ids, length)
    itself = compare(reference_logits(reference, ids, length, other_way=True), expected)
    found = engine_logits(model, ids, length)
    ours = compare(found, expected)
    num_prompt = len(prompt_rows(length))
    from_fp32 = {}
    if exact is not None:
        truth = reference_logits(exact, ids, length)
        from_fp32 = {
            "ours": compare(found, truth)["rms"],
            "transformers": compare(expected, truth)["rms"],
        }
    return {
        "prompt": length,
        "ours": ours,
        "prefill": compare(found[:num_prompt], expected[:num_prompt]),
        "decode": compare(found[num_prompt:], expected[num_prompt:]),
        "itself": itself,
        "from_fp32": from_fp32,
        "ok": passes(ours, itself, from_fp32),
    }
