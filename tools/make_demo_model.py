"""Trains the demo model and writes it as a checkpoint folder. Needs torch, tokenizers, jinja2.

    python -m tools.demo_sources SRC build/demo/sources.json.gz      # once, see demo_sources
    python -m tools.demo_corpus build/demo/sources.json.gz models/demo      # tokenizer, once
    python -m tools.make_demo_model --minutes 7 --out models/demo

Text is generated, tokenised and packed by worker processes for as long as training lasts; the
schedule follows the clock, so a run always ends with the learning rate at its floor.
"""

import argparse
import multiprocessing as mp
import queue
import time
from pathlib import Path
from typing import Any

import numpy as np
import torch
from tokenizers import Tokenizer
from torch import Tensor

from tools.demo_checkpoint import text_config, write_folder
from tools.demo_corpus import Corpus, load_sources, rows
from tools.demo_recall import make_key, passage, subjects
from tools.demo_torch_model import DemoModel

ROWS_A_BLOCK = 16


def produce(out: Any, sources_path: str, tokenizer_path: str, length: int, seed: int) -> None:
    """A worker: puts blocks of rows into the queue for ever."""
    corpus = Corpus(load_sources(sources_path), seed)
    stream = rows(corpus, Tokenizer.from_file(tokenizer_path), length)
    while True:
        out.put(np.stack([next(stream) for _ in range(ROWS_A_BLOCK)]))


class Pool:
    """A ring of the newest rows on the device; batches are drawn from it at random."""

    def __init__(self, args: argparse.Namespace, device: torch.device) -> None:
        context = mp.get_context("spawn")
        self.queue = context.Queue(maxsize=128)
        self.rows = torch.zeros(args.pool_rows, args.seq + 1, dtype=torch.int16, device=device)
        self.added = 0
        tokenizer = str(Path(args.tokenizer) / "tokenizer.json")
        self.workers = [
            context.Process(
                target=produce,
                args=(self.queue, args.sources, tokenizer, args.seq + 1, args.seed * 1000 + i),
                daemon=True,
            )
            for i in range(args.workers)
        ]
        for worker in self.workers:
            worker.start()

    def refill(self, wait: bool = False) -> None:
        """Takes what the workers have ready, at most 64 blocks."""
        for _ in range(64):
            try:
                block = self.queue.get(block=wait)
            except queue.Empty:
                return
            start = self.added % len(self.rows)
            fresh = torch.from_numpy(block.astype(np.int16)).to(self.rows.device)
            self.rows[start : start + ROWS_A_BLOCK] = fresh
            self.added += ROWS_A_BLOCK

    def batch(self, size: int) -> Tensor:
        count = min(self.added, len(self.rows))
        chosen = torch.randint(count, (size,), device=self.rows.device)
        return self.rows[chosen].long()

    def close(self) -> None:
        for worker in self.workers:
            worker.terminate()


def orthogonal(x: Tensor) -> Tensor:
    """Newton-Schulz iteration of Muon on a stack of matrices: nearly orthogonal rows or columns."""
    x = x.bfloat16() if x.is_cuda else x
    tall = x.shape[-2] > x.shape[-1]
    x = x.mT if tall else x
    x = x / (x.norm(dim=(-2, -1), keepdim=True) + 1e-7)
    for _ in range(5):
        gram = x @ x.mT
        x = 3.4445 * x + (-4.7750 * gram + 2.0315 * gram @ gram) @ x
    return (x.mT if tall else x).float()


class Optimizer:
    """Muon for the matrices inside the layers, AdamW for the embedding and everything small."""

    def __init__(self, model: DemoModel, muon_lr: float, adam_lr: float) -> None:
        groups: dict[tuple[int, ...], list[Tensor]] = {}
        rest = []
        for name, weight in model.weights.items():
            small = name.endswith(("in_proj_a/weight", "in_proj_b/weight"))
            if weight.ndim == 2 and "embed" not in name and not small:
                groups.setdefault(tuple(weight.shape), []).append(weight)
            else:
                rest.append(weight)
        self.muon = [(g, [torch.zeros_like(w) for w in g]) for g in groups.values()]
        self.muon_lr = muon_lr
        self.adam = torch.optim.AdamW(rest, lr=adam_lr, betas=(0.9, 0.95), weight_decay=0.0)
        self.adam_lr = adam_lr

    @torch.no_grad()
    def step(self, scale: float, momentum: float) -> None:
        for group in self.adam.param_groups:
            group["lr"] = self.adam_lr * scale
        self.adam.step()
        for weights, moments in self.muon:
            grads = [w.grad for w in weights]
            torch._foreach_lerp_(moments, grads, 1 - momentum)
            nesterov = torch._foreach_lerp(grads, moments, momentum)
            update = orthogonal(torch.stack(nesterov))
            rate = self.muon_lr * scale * max(1.0, weights[0].shape[0] / weights[0].shape[1]) ** 0.5
            torch._foreach_mul_(weights, 1 - 0.02 * self.muon_lr * scale)
            torch._foreach_add_(weights, list(update.unbind()), alpha=-rate)


class TrainStep:
    """Forward and backward on one batch, captured as a CUDA graph where there is CUDA."""

    def __init__(self, model: DemoModel, batch: Tensor) -> None:
        self.model, self.static, self.graph = model, batch.clone(), None
        self.loss = torch.zeros(())
        if not batch.is_cuda:
            return
        side = torch.cuda.Stream()
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            for _ in range(3):
                self.compute()
        torch.cuda.current_stream().wait_stream(side)
        self.model.zero_grad(set_to_none=True)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            self.compute()
        self.graph = graph

    def compute(self) -> None:
        self.model.zero_grad(set_to_none=True)
        loss = self.model(self.static[:, :-1].contiguous(), self.static[:, 1:].contiguous())
        loss.backward()
        self.loss = loss.detach()

    def run(self, batch: Tensor) -> Tensor:
        self.static.copy_(batch)
        if self.graph is None:
            self.compute()
        else:
            self.graph.replay()
        return self.loss


def schedule(done: float, step: int) -> float:
    """Learning-rate factor: 50 warm-up steps, flat to 40 % of the time, then linear to 2 %."""
    decay = 1.0 if done < 0.4 else max(0.02, (1 - done) / 0.6)
    return min(1.0, (step + 1) / 50) * decay


@torch.no_grad()
def recall_rates(
    model: DemoModel,
    tokenizer: Tokenizer,
    sources: dict[str, Any],
    count: int,
    device: torch.device,
) -> dict[int, float]:
    """By distance: the share of passages, each with two held-out keys, where all four digits of the
    key that is asked for are the model's first choice."""
    corpus = Corpus(sources, seed=987654321)
    rates = {}
    for distance in (50, 100, 200, 400, 800, 1400):
        right = 0
        for _ in range(count):
            keys = {s: make_key(corpus.rng, held_out=True) for s in subjects(corpus.rng, 2)}
            text, answer = passage(corpus.rng, corpus.filler, int(distance * 3.5), keys)
            ids, tail = tokenizer.encode(text).ids, tokenizer.encode(answer.rstrip(".")).ids
            full = ids + tail
            padded = torch.tensor([full + [0] * (-len(full) % 64)], device=device)
            best = model.logits(padded)[0, len(ids) - 1 : len(full) - 1].argmax(-1).tolist()
            right += best == tail
        rates[distance] = right / count
    return rates


def train(args: argparse.Namespace) -> None:
    started = time.time()
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    torch.manual_seed(args.seed)
    torch.backends.cuda.matmul.allow_tf32 = True
    pool = Pool(args, device)
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    model = DemoModel(text_config(), dtype, args.compile).to(device)
    if args.resume:
        model.load(args.resume)
    optimizer = Optimizer(model, args.muon_lr, args.adam_lr)
    while pool.added < 2 * args.batch:
        pool.refill(wait=True)
    print(f"workers ready after {time.time() - started:.0f} s", flush=True)
    step_fn = TrainStep(model, pool.batch(args.batch))
    print(f"step ready after {time.time() - started:.0f} s", flush=True)

    begin, step, log = time.time(), 0, []
    budget = args.minutes * 60
    while (now := time.time() - begin) < budget:
        pool.refill()
        loss = step_fn.run(pool.batch(args.batch))
        optimizer.step(schedule(now / budget, step), 0.85 + 0.1 * min(1.0, step / 300))
        step += 1
        if step % 20 == 0 or step < 4:
            log.append(loss.item())  # also keeps the host from running ahead of the clock
        if step % 200 == 0 or step in (2, 20, 60):
            tokens = step * args.batch * args.seq
            print(
                f"step {step} loss {np.mean(log[-10:]):.3f} {tokens / 1e6:.0f} M tokens "
                f"{tokens / now / 1e6:.2f} M/s new rows {pool.added} {now:.0f} s",
                flush=True,
            )
    pool.close()
    tokenizer = Tokenizer.from_file(str(Path(args.tokenizer) / "tokenizer.json"))
    write_folder(Path(args.out), tokenizer, model.checkpoint())
    print(f"wrote {args.out}, {step} steps, fresh tokens {pool.added * args.seq / 1e6:.0f} M, loss "
          f"{np.mean(log[-10:]):.3f}, {time.time() - started:.0f} s", flush=True)  # fmt: skip
    if device.type == "cuda":
        print(f"{torch.cuda.max_memory_allocated() / 2**30:.1f} GiB at most", flush=True)
    if args.recall:
        plain = DemoModel(text_config(), dtype, compiled=False).to(device)
        plain.load_state_dict(model.state_dict())
        print(recall_rates(plain, tokenizer, load_sources(args.sources), args.recall, device))
    print(f"done after {time.time() - started:.0f} s", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--sources", default="build/demo/sources.json.gz")
    parser.add_argument("--tokenizer", default="models/demo", help="folder with tokenizer.json")
    parser.add_argument("--out", required=True)
    parser.add_argument("--minutes", type=float, default=7.0, help="training alone")
    parser.add_argument("--batch", type=int, default=32, help="rows a step")
    parser.add_argument("--seq", type=int, default=2048, help="tokens a row, a multiple of 64")
    parser.add_argument("--muon-lr", type=float, default=0.02)
    parser.add_argument("--adam-lr", type=float, default=4e-3)
    parser.add_argument("--workers", type=int, default=15)
    parser.add_argument("--pool-rows", type=int, default=32768)
    parser.add_argument("--recall", type=int, default=50, help="evaluation passages a distance")
    parser.add_argument("--resume", help="model.safetensors to start from")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--compile", action=argparse.BooleanOptionalAction, default=True)
    train(parser.parse_args())


if __name__ == "__main__":
    main()
