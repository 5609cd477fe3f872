"""The demo model in torch, for training alone: full sequences, no caches.

Parameters carry the names of the HF checkpoint below `model.language_model.`. The layers are
functions of plain tensors, so that torch.compile makes one graph for all layers of a kind.
Training precision: fp32 weights and residual, bf16 GEMMs and attention, fp32 (TF32) delta rule.
"""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

CHUNK = 64
HEAD_DIM, ROTARY_DIM = 256, 64


def rms_norm(x: Tensor, weight: Tensor) -> Tensor:
    """x / rms(x) * (1 + weight), fp32."""
    x = x.float()
    return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + 1e-6) * (1 + weight)


def linear(x: Tensor, weight: Tensor, dtype: torch.dtype) -> Tensor:
    return F.linear(x.to(dtype), weight.to(dtype))


def l2_norm(x: Tensor) -> Tensor:
    return x * torch.rsqrt(x.square().sum(-1, keepdim=True) + 1e-6)


def chunked(x: Tensor) -> Tensor:
    """[B, T, H, D] -> [T / 64, B, H, 64, D]."""
    batch, length, heads, dim = x.shape
    return x.view(batch, length // CHUNK, CHUNK, heads, dim).permute(1, 0, 3, 2, 4)


def delta_inputs(
    x: Tensor, norm: Tensor, qkv: Tensor, z: Tensor, b: Tensor, a: Tensor, conv: Tensor,
    dt_bias: Tensor, a_log: Tensor, dtype: torch.dtype,
) -> tuple[Tensor, ...]:  # fmt: skip
    """Everything of a linear-attention layer before the UT inverse: A, rhs, and the scan's parts.

    Returns (A, beta V, beta exp(G) K, P, exp(G) Q, exp(G_n - G) K, exp(G_n), z), all chunked.
    """
    y = rms_norm(x, norm)
    mixed = linear(y, qkv, dtype).float()
    length, heads = x.shape[1], a_log.shape[0]
    padded = F.pad(mixed, (0, 0, 3, 0))
    mixed = F.silu(sum(padded[:, j : j + length] * conv[:, 0, j] for j in range(4)))
    key_dim = (mixed.shape[-1] - heads * 128) // 2
    q, k, v = mixed.split([key_dim, key_dim, heads * 128], -1)
    q = chunked(l2_norm(q.unflatten(-1, (-1, 128))) * 128**-0.5)
    k = chunked(l2_norm(k.unflatten(-1, (-1, 128))))
    v = chunked(v.unflatten(-1, (-1, 128)))
    rep = heads // k.shape[2]
    beta = chunked(linear(y, b, dtype).float().sigmoid()[..., None])
    decay = -a_log.exp() * F.softplus(linear(y, a, dtype).float() + dt_bias)
    g = chunked(decay[..., None]).cumsum(3)  # [N, B, H, 64, 1]
    lower = torch.ones(CHUNK, CHUNK, dtype=torch.bool, device=x.device).tril()
    pairs = (g - g.transpose(-1, -2)).masked_fill(~lower, float("-inf")).exp()
    kk = (k @ k.transpose(-1, -2)).repeat_interleave(rep, 2)
    qk = (q @ k.transpose(-1, -2)).repeat_interleave(rep, 2)
    q, k = q.repeat_interleave(rep, 2), k.repeat_interleave(rep, 2)
    system = (beta * kk * pairs).tril(-1)
    out_gate = linear(y, z, dtype).unflatten(-1, (-1, 128))
    last = g[:, :, :, -1:]
    return (system, beta * v, beta * g.exp() * k, qk * pairs, q * g.exp(), k * (last - g).exp(),
            last.exp(), out_gate)  # fmt: skip


def unit_lower_inverse(a: Tensor) -> Tensor:
    """(I + a)^-1 of strictly lower triangular [..., 64, 64], by 16 x 16 blocks and two merges."""
    diagonal = torch.stack([a[..., i : i + 16, i : i + 16] for i in range(0, 64, 16)], -3)
    power = -diagonal
    inverse = power + torch.eye(16, device=a.device)
    for _ in range(3):
        power = power @ power
        inverse = inverse + inverse @ power
    blocks = list(inverse.unbind(-3))
    size = 16
    while size < CHUNK:
        merged = []
        for i in range(0, len(blocks), 2):
            top, bottom = blocks[i], blocks[i + 1]
            row = (i + 1) * size
            left = -bottom @ a[..., row : row + size, row - size : row] @ top
            upper = torch.cat([top, torch.zeros_like(top)], -1)
            merged.append(torch.cat([upper, torch.cat([left, bottom], -1)], -2))
        blocks, size = merged, size * 2
    return blocks[0]


class UnitLowerInverse(torch.autograd.Function):
    """`unit_lower_inverse` in full fp32; its gradient needs only the result."""

    @staticmethod
    def forward(ctx: Any, a: Tensor) -> Tensor:
        tf32 = torch.backends.cuda.matmul.allow_tf32
        torch.backends.cuda.matmul.allow_tf32 = False
        inverse = unit_lower_inverse(a)
        torch.backends.cuda.matmul.allow_tf32 = tf32
        ctx.save_for_backward(inverse)
        return inverse

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        (inverse,) = ctx.saved_tensors
        flipped = inverse.transpose(-1, -2)
        return -(flipped @ grad @ flipped).tril(-1)


class ChunkScan(torch.autograd.Function):
    """The loop over chunks; see `forward` for the recurrence. All inputs [N, B * H, 64, *]."""

    @staticmethod
    def forward(
        ctx: Any, u: Tensor, w: Tensor, p: Tensor, q: Tensor, k: Tensor, gamma: Tensor
    ) -> Tensor:
        """V' = u - w S;  out = q S + p V';  S <- gamma S + k^T V', S from zero."""
        count, heads, _, dim = u.shape
        states = u.new_zeros(count + 1, heads, w.shape[-1], dim)
        values = torch.empty_like(u)
        for c in range(count):
            torch.baddbmm(u[c], w[c], states[c], alpha=-1, out=values[c])
            torch.baddbmm(states[c] * gamma[c], k[c].mT, values[c], out=states[c + 1])
        ctx.save_for_backward(w, p, q, k, gamma, states, values)
        return q @ states[:-1] + p @ values

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, ...]:
        w, p, q, k, gamma, states, values = ctx.saved_tensors
        grad_values = p.mT @ grad  # grows by the state's part below
        grad_states = q.mT @ grad  # of the state that enters chunk c
        grad_next = torch.zeros_like(states[0])
        grad_out_states = torch.empty_like(grad_states)
        for c in reversed(range(len(w))):
            grad_out_states[c].copy_(grad_next)
            grad_values[c].baddbmm_(k[c], grad_next)
            decayed = torch.addcmul(grad_states[c], grad_next, gamma[c])
            grad_next = torch.baddbmm(decayed, w[c].mT, grad_values[c], alpha=-1)
        grad_gamma = (grad_out_states * states[:-1]).sum((-1, -2), keepdim=True)
        return (
            grad_values,
            -(grad_values @ states[:-1].mT),
            grad @ values.mT,
            grad @ states[:-1].mT,
            values @ grad_out_states.mT,
            grad_gamma,
        )


def delta_output(
    x: Tensor, o: Tensor, z: Tensor, norm: Tensor, out: Tensor, dtype: torch.dtype
) -> Tensor:
    """Chunked scan output [N, B, H, 64, 128] -> residual plus the gated, projected output."""
    o = o.permute(1, 0, 3, 2, 4).reshape(z.shape)
    o = o * torch.rsqrt(o.square().mean(-1, keepdim=True) + 1e-6) * norm
    return x + linear((o * F.silu(z.float())).flatten(-2), out, dtype)


def rope(x: Tensor) -> Tensor:
    """Rotates dims (i, i + 32) of the first 64 of [B, T, H, 256] by position."""
    half = ROTARY_DIM // 2
    steps = torch.arange(half, device=x.device, dtype=torch.float32)
    angle = torch.arange(x.shape[1], device=x.device)[:, None] * 10000000.0 ** (-steps / half)
    cos, sin = angle.cos()[:, None], angle.sin()[:, None]
    first, second, rest = x.split([half, half, HEAD_DIM - ROTARY_DIM], -1)
    return torch.cat([first * cos - second * sin, second * cos + first * sin, rest], -1)


def full_attention(
    x: Tensor, norm: Tensor, q_proj: Tensor, k_proj: Tensor, v_proj: Tensor, o_proj: Tensor,
    q_norm: Tensor, k_norm: Tensor, dtype: torch.dtype,
) -> Tensor:  # fmt: skip
    y = rms_norm(x, norm)
    q, gate = linear(y, q_proj, dtype).unflatten(-1, (-1, 2, HEAD_DIM)).unbind(-2)
    k = linear(y, k_proj, dtype).unflatten(-1, (-1, HEAD_DIM))
    v = linear(y, v_proj, dtype).unflatten(-1, (-1, HEAD_DIM))
    q, k = rope(rms_norm(q, q_norm)).to(dtype), rope(rms_norm(k, k_norm)).to(dtype)
    q, k, v = (t.transpose(1, 2) for t in (q, k, v))
    o = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True).transpose(1, 2)
    return x + linear((o * gate.sigmoid()).flatten(-2), o_proj, dtype)


def mlp(
    x: Tensor, norm: Tensor, gate: Tensor, up: Tensor, down: Tensor, dtype: torch.dtype
) -> Tensor:
    y = rms_norm(x, norm)
    return x + linear(F.silu(linear(y, gate, dtype)) * linear(y, up, dtype), down, dtype)


def head_loss(
    x: Tensor, norm: Tensor, embedding: Tensor, labels: Tensor, dtype: torch.dtype
) -> Tensor:
    logits = linear(rms_norm(x, norm), embedding, dtype).float()
    return F.cross_entropy(logits.flatten(0, 1), labels.flatten())


class DemoModel(nn.Module):
    """`forward(ids, labels)` is the mean loss; ids [B, T] with T a multiple of 64."""

    def __init__(self, config: dict[str, Any], dtype: torch.dtype, compiled: bool) -> None:
        super().__init__()
        self.dtype, self.layer_types = dtype, config["layer_types"]
        wrap = torch.compile if compiled else lambda f: f
        self.delta_inputs, self.delta_output = wrap(delta_inputs), wrap(delta_output)
        self.attention, self.mlp, self.loss = wrap(full_attention), wrap(mlp), wrap(head_loss)
        self.weights = nn.ParameterDict()
        self.shapes(config)

    def shapes(self, config: dict[str, Any]) -> None:
        """Makes all parameters, initialised."""
        h, f = config["hidden_size"], config["intermediate_size"]
        q, kv = config["num_attention_heads"] * HEAD_DIM, config["num_key_value_heads"] * HEAD_DIM
        heads = config["linear_num_value_heads"]
        value, keys = heads * 128, config["linear_num_key_heads"] * 128
        deep = (2 * len(self.layer_types)) ** -0.5
        self.add("embed_tokens.weight", torch.randn(config["vocab_size"], h) * 0.02)
        self.add("norm.weight", torch.zeros(h))
        for i, kind in enumerate(self.layer_types):
            shapes = {"mlp.gate_proj": (f, h), "mlp.up_proj": (f, h), "mlp.down_proj": (h, f)}
            vectors = {"input_layernorm": h, "post_attention_layernorm": h}
            if kind == "full_attention":
                shapes |= {"self_attn.q_proj": (2 * q, h), "self_attn.k_proj": (kv, h)}
                shapes |= {"self_attn.v_proj": (kv, h), "self_attn.o_proj": (h, q)}
                vectors |= {"self_attn.q_norm": HEAD_DIM, "self_attn.k_norm": HEAD_DIM}
            else:
                mixed = 2 * keys + value
                rows = {"in_proj_qkv": mixed, "in_proj_z": value, "in_proj_b": heads}
                rows |= {"in_proj_a": heads}
                shapes |= {f"linear_attn.{name}": (size, h) for name, size in rows.items()}
                shapes |= {"linear_attn.out_proj": (h, value)}
                # decay rates as in Mamba: a step's log decay between 1e-3 and 0.1 times A
                step = torch.exp(torch.empty(heads).uniform_(-6.9, -2.3))
                self.add(f"layers.{i}.linear_attn.dt_bias", step + torch.log(-torch.expm1(-step)))
                self.add(f"layers.{i}.linear_attn.A_log", torch.empty(heads).uniform_(1, 16).log())
                self.add(f"layers.{i}.linear_attn.norm.weight", torch.ones(128))
                conv = torch.empty(mixed, 1, 4).uniform_(-0.5, 0.5)
                self.add(f"layers.{i}.linear_attn.conv1d.weight", conv)
            for name, shape in shapes.items():
                into_residual = name.endswith(("down_proj", "o_proj", "out_proj"))
                scale = shape[1] ** -0.5 * (deep if into_residual else 1)
                self.add(f"layers.{i}.{name}.weight", torch.randn(shape) * scale)
            for name, size in vectors.items():
                self.add(f"layers.{i}.{name}.weight", torch.zeros(size))

    def add(self, name: str, value: Tensor) -> None:
        self.weights[name.replace(".", "/")] = nn.Parameter(value)

    def get(self, layer: int, *names: str) -> list[Tensor]:
        return [self.weights[f"layers.{layer}.{name}".replace(".", "/")] for name in names]

    def forward(self, ids: Tensor, labels: Tensor) -> Tensor:
        embedding, norm = self.weights["embed_tokens/weight"], self.weights["norm/weight"]
        return self.loss(self.hidden(ids), norm, embedding, labels, self.dtype)

    def logits(self, ids: Tensor) -> Tensor:
        embedding, norm = self.weights["embed_tokens/weight"], self.weights["norm/weight"]
        return linear(rms_norm(self.hidden(ids), norm), embedding, self.dtype).float()

    def hidden(self, ids: Tensor) -> Tensor:
        x = F.embedding(ids, self.weights["embed_tokens/weight"])
        for i, kind in enumerate(self.layer_types):
            norm = self.get(i, "input_layernorm.weight")
            if kind == "full_attention":
                heads = ("q_proj", "k_proj", "v_proj", "o_proj", "q_norm", "k_norm")
                inner = self.get(i, *(f"self_attn.{n}.weight" for n in heads))
                x = self.attention(x, *norm, *inner, self.dtype)
            else:
                x = self.linear_layer(i, x, *norm)
            names = ("gate_proj", "up_proj", "down_proj")
            norm = self.get(i, "post_attention_layernorm.weight")
            x = self.mlp(x, *norm, *self.get(i, *(f"mlp.{n}.weight" for n in names)), self.dtype)
        return x

    def linear_layer(self, i: int, x: Tensor, norm: Tensor) -> Tensor:
        names = ("in_proj_qkv.weight", "in_proj_z.weight", "in_proj_b.weight", "in_proj_a.weight",
                 "conv1d.weight", "dt_bias", "A_log", "norm.weight", "out_proj.weight")  # fmt: skip
        *inner, gate_norm, out = self.get(i, *(f"linear_attn.{n}" for n in names))
        system, v, k, p, q, k_end, gamma, z = self.delta_inputs(x, norm, *inner, self.dtype)
        shape = v.shape
        inverse = UnitLowerInverse.apply(system)
        parts = [inverse @ v, inverse @ k, p, q, k_end, gamma]
        o = ChunkScan.apply(*(t.flatten(1, 2).contiguous() for t in parts))
        return self.delta_output(x, o.view(shape), z, gate_norm, out, self.dtype)

    def load(self, path: str) -> None:
        """Takes the weights of a `checkpoint` file."""
        from safetensors.torch import load_file

        for name, value in load_file(path).items():
            key = name.removeprefix("model.language_model.").replace(".", "/")
            self.weights[key].data.copy_(value)

    def checkpoint(self) -> dict[str, Tensor]:
        """The weights by HF names: A_log and the gated norm in fp32, all else in bf16."""
        out = {}
        for key, value in self.weights.items():
            name = key.replace("/", ".")
            keep = name.endswith((".A_log", "linear_attn.norm.weight"))
            value = value.detach().cpu().to(torch.float32 if keep else torch.bfloat16)
            out["model.language_model." + name] = value.contiguous()
        return out
