"""The demo behind ``attn3 demo --serve``: continuous batching through one ``PagedKVCache``.

Many questions with a common system prompt are answered by a real language model. Requests join and leave in every step, each step
is one forward over the new tokens of all of them, and the pages of the system prompt are shared. Every answer is then compared,
token by token, with that of eager attention to the same question alone.
"""

from __future__ import annotations

import json
import sys
import time
from collections import deque
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Sequence

import torch
from rich.console import Console, Group
from rich.live import Live
from rich.markup import escape
from rich.table import Table
from rich.text import Text

from attn3 import demo
from attn3.cache import PagedKVCache
from attn3.errors import CacheFull

SYSTEM = (
    "You are a helpful assistant of a small museum of science. Visitors ask short questions. Answer each question in one or two"
    " plain sentences, without lists, and without greetings. If you do not know an answer, say so."
)
QUESTIONS = (
    "Why is the sky blue?",
    "How does a compass find north?",
    "What is the difference between a comet and an asteroid? I always mix them up.",
    "Who invented the telescope?",
    "My son wants to know how heavy a blue whale is, compared with an elephant.",
    "What is inside an atom?",
    "Why do leaves turn red in autumn?",
    "How far away is the Moon?",
    "Is glass a liquid? A friend told me that old windows are thicker at the bottom because the glass has flowed down.",
    "What is an eclipse?",
    "How do bees make honey?",
    "Why is the sea salty?",
    "What does a microscope do?",
    "How old is the Earth, and how do we know?",
    "What was the first computer?",
    "Can sound travel through empty space, as it does in films about starships?",
)
PAGE_SIZE = 16
AT_ONCE = 8


@dataclass
class Request:
    """A question on its way: what has been asked, and what has been answered so far."""

    number: int
    ids: list[int]
    answer: list[int] = field(default_factory=list)
    sequence: int | None = None  # in the cache, while it is being served
    waited: int = 0  # times it was put back in the queue for lack of pages

    @property
    def known(self) -> list[int]:
        return self.ids + self.answer


class Server:
    """Greedy continuous batching: ``submit`` requests, call ``step`` until ``busy`` is false.

    Args:
        network: a causal language model of Transformers with attn3 as its attention.
        cache: for all sequences; they share the pages of ``prefix``, the tokens that every request begins with.
        ends: tokens that end an answer. limit: tokens of the longest answer. at_once: requests in one step, at most.
    """

    def __init__(
        self, network: Any, cache: PagedKVCache, prefix: Sequence[int], ends: Sequence[int], limit: int, at_once: int = AT_ONCE
    ) -> None:
        self.network, self.cache, self.ends, self.limit, self.at_once = network, cache, set(ends), limit, at_once
        self.waiting: deque[Request] = deque()
        self.active: list[Request] = []
        self.done: list[Request] = []
        self.prefix = cache.allocate()
        self.prefix_length = len(prefix)
        if prefix:
            self._forward([self.prefix], [list(prefix)])

    def submit(self, request: Request) -> None:
        self.waiting.append(request)

    @property
    def busy(self) -> bool:
        return bool(self.waiting or self.active)

    def step(self) -> int:
        """One forward for all active requests, with as many new ones as there is room for; the number of new tokens."""
        if not self._admit() and not self.active:
            waiting = self.waiting[0]
            raise CacheFull(
                f"request {waiting.number} has {len(waiting.known)} tokens and nothing else is being served, and the cache's"
                f" {self.cache.pages} pages of {self.cache.page_size} do not hold it; make the cache larger"
            )
        while True:
            parts = [r.known[self.cache.length(r.sequence) :] for r in self.active]
            try:
                logits = self._forward([r.sequence for r in self.active], parts)
                break
            except CacheFull:
                if len(self.active) == 1:
                    raise
                self._put_back(self.active.pop())  # the one that came last
        for request, token in zip(list(self.active), logits.argmax(-1).tolist(), strict=True):
            request.answer.append(token)
            if token in self.ends or len(request.answer) == self.limit:
                self.active.remove(request)
                self.cache.free(request.sequence)
                request.sequence = None
                self.done.append(request)
        return len(logits)

    def _admit(self) -> int:
        admitted = 0
        while self.waiting and len(self.active) < self.at_once:
            # its own tokens, one more page, and a copy of the prefix's last page
            pages = -(-(len(self.waiting[0].known) - self.prefix_length) // self.cache.page_size) + 2
            if pages > self.cache.free_pages - 2 * admitted and self.active:
                break
            request = self.waiting.popleft()
            request.sequence = self.cache.fork(self.prefix)
            self.active.append(request)
            admitted += 1
        return admitted

    def _put_back(self, request: Request) -> None:
        self.cache.free(request.sequence)
        request.sequence = None
        request.waited += 1
        self.waiting.appendleft(request)  # what it has answered is read again with its question

    def _forward(self, sequences: list[int], parts: list[list[int]]) -> torch.Tensor:
        """The logits behind each sequence's new tokens, (sequences, vocabulary)."""
        batch = self.cache.extend(sequences, [len(part) for part in parts])
        ids = torch.tensor([token for part in parts for token in part], device=self.cache.device)
        with torch.inference_mode():
            found = self.network(
                ids[None], position_ids=batch.positions[None], kv_batch=batch, use_cache=False,
                logits_to_keep=batch.cu_seqlens[1:].long() - 1,
            )  # fmt: skip
        return found.logits[0]


def run(model: str | None, output: Path, device: str | None, dtype: str | None, new_tokens: int, requests: int) -> int:
    """Runs the demo; 0 if every answer is eager attention's, 1 if not. Raises ``demo.DemoError``."""
    console, progress = Console() if sys.stdout.isatty() else Console(width=120), Console(stderr=True)
    device = device or ("cuda" if torch.cuda.is_available() else "cpu")
    dtype = dtype or ("float32" if device == "cpu" else "bfloat16")
    output.mkdir(parents=True, exist_ok=True)
    with progress.status("loading the model"):
        tokenizer, network = demo.load(model, device, dtype)
    console.print(f"[bold]{demo.source(model)[1]}[/], {dtype} on {device}: {requests} questions, up to {AT_ONCE} at once")
    prompts = [_prompt(tokenizer, QUESTIONS[i % len(QUESTIONS)]) for i in range(requests)]
    prefix = _common(prompts)
    config = network.config.get_text_config()
    kv_heads = config.num_key_value_heads
    head_dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    longest = max(len(ids) for ids in prompts) + new_tokens
    cache = PagedKVCache(
        -(-len(prefix) // PAGE_SIZE) + AT_ONCE * (-(-(longest - len(prefix)) // PAGE_SIZE) + 2), PAGE_SIZE, kv_heads, head_dim,
        layers=config.num_hidden_layers, dtype=getattr(torch, dtype), device=device,
    )  # fmt: skip
    ends = network.generation_config.eos_token_id
    network.set_attn_implementation("attn3")
    server = Server(network, cache, prefix, [ends] if isinstance(ends, int) else ends or [], new_tokens)
    asked = [Request(i, ids) for i, ids in enumerate(prompts)]
    for request in asked:
        server.submit(request)
    speed = _serve(server, asked, tokenizer, progress)
    console.print(_table(asked, tokenizer))

    eager_seconds, differences = 0.0, []
    network.set_attn_implementation("eager")
    for request in asked:
        with progress.status(f"the same question {request.number + 1} of {requests} alone, with eager attention"):
            start = time.perf_counter()
            found = network.generate(
                torch.tensor([request.ids], device=device), attention_mask=torch.ones(1, len(request.ids), device=device),
                max_new_tokens=new_tokens, do_sample=False, output_logits=True, return_dict_in_generate=True,
            )  # fmt: skip
            eager_seconds += time.perf_counter() - start
        eager = found.sequences[0, len(request.ids) :].tolist()
        if eager != request.answer:
            differences.append((request.number, _gap(request.answer, eager, found.logits)))
    tokens, seconds = sum(len(r.answer) for r in asked), speed["seconds"]
    shared = (requests - 1) * (len(prefix) // PAGE_SIZE)
    # where rounding decides between two tokens, the logits of both are within rounding
    allowed = 1e-3 if dtype == "float32" else 0.25
    agrees = all(gap <= allowed for _, gap in differences)
    verdict = "[green]every token is eager attention's[/]"
    if differences:
        worst = max(gap for _, gap in differences)
        colour = "green" if agrees else "red"
        verdict = f"[{colour}]{len(differences)} of {requests} answers part from eager's, over logits {worst:.2g} apart at most[/]"
    console.print(verdict)
    console.print(
        f"attn3: {tokens} tokens in {seconds:.1f} s, {tokens / seconds:.1f} a second, prompts included; eager, one question after"
        f" the other: {tokens / eager_seconds:.1f} a second\nthe system prompt's {len(prefix)} tokens were read and kept once:"
        f" {speed['pages']} pages at most, {shared} more if each question had its own"
    )
    report = {
        "device": device, "dtype": dtype, "requests": requests, "tokens": tokens, "prefix_tokens": len(prefix), **speed,
        "tokens_per_second": tokens / seconds, "eager_tokens_per_second": tokens / eager_seconds,
        "different_answers": len(differences), "answers": [tokenizer.decode(r.answer, skip_special_tokens=True) for r in asked],
    }  # fmt: skip
    (output / "serve.json").write_text(json.dumps(report, indent=1) + "\n", encoding="utf-8")
    console.print(f"wrote {output / 'serve.json'}")
    return 0 if agrees else 1


def _serve(server: Server, asked: list[Request], tokenizer: Any, progress: Console) -> dict[str, Any]:
    """Serves all requests, with a live table; seconds, steps, and the most pages in use."""
    start, steps, tokens, pages = time.perf_counter(), 0, 0, 0
    recent: deque[tuple[float, int]] = deque(maxlen=20)
    with Live(console=progress, auto_refresh=False, transient=True) as live:
        while server.busy:
            tokens += server.step()
            steps += 1
            pages = max(pages, server.cache.pages - server.cache.free_pages)
            recent.append((time.perf_counter(), tokens))
            if progress.is_terminal:
                live.update(_screen(server, asked, tokenizer, recent, tokens), refresh=True)
    return {"seconds": time.perf_counter() - start, "steps": steps, "pages": pages}


def _screen(server: Server, asked: list[Request], tokenizer: Any, recent: deque[tuple[float, int]], tokens: int) -> Group:
    (first, before), (last, after) = recent[0], recent[-1]
    now = (after - before) / (last - first) if last > first else 0.0
    cache = server.cache
    head = (
        f"{now:.1f} tokens a second, {tokens} so far | {len(server.active)} served, {len(server.waiting)} waiting,"
        f" {len(server.done)} done | pages {cache.pages - cache.free_pages} of {cache.pages}"
    )
    table = Table(box=None, show_header=False, padding=(0, 1))
    for _ in range(3):
        table.add_column(no_wrap=True, overflow="ellipsis")
    for r in asked:
        state = "waits" if r in server.waiting else "done" if r.sequence is None else "served"
        colour = {"waits": "dim", "done": "green", "served": "bold"}[state]
        text = tokenizer.decode(r.answer[-24:], skip_special_tokens=True).replace("\n", " ")
        table.add_row(f"[{colour}]{state}[/]", f"{len(r.answer)} tokens", Text(text))
    return Group(Text(head, style="bold"), table)


def _table(asked: list[Request], tokenizer: Any) -> Table:
    table = Table(title="Answers")
    table.add_column("question")
    table.add_column("tokens", justify="right")
    table.add_column("answer")
    for r in asked:
        answer = tokenizer.decode(r.answer, skip_special_tokens=True).strip()
        table.add_row(escape(QUESTIONS[r.number % len(QUESTIONS)]), str(len(r.answer)), escape(answer))
    return table


def _prompt(tokenizer: Any, question: str) -> list[int]:
    if not tokenizer.chat_template:
        return tokenizer(f"{SYSTEM}\n\nQuestion: {question}\nAnswer:").input_ids
    chat = [{"role": "system", "content": SYSTEM}, {"role": "user", "content": question}]
    return list(tokenizer.apply_chat_template(chat, add_generation_prompt=True, return_dict=True)["input_ids"])


def _common(prompts: list[list[int]]) -> list[int]:
    """The tokens that all begin with, but never a whole prompt: its last token has to be read for its logits."""
    length = 0
    while all(len(ids) > length + 1 and ids[length] == prompts[0][length] for ids in prompts):
        length += 1
    return prompts[0][:length]


def _gap(ours: list[int], eager: list[int], logits: Sequence[torch.Tensor]) -> float:
    """How far apart the logits are, in eager's own forward, of the first two tokens that differ."""
    same = next((i for i, (a, b) in enumerate(zip(ours, eager, strict=False)) if a != b), None)
    if same is None:
        return float("inf")  # one is the beginning of the other: no token was in question
    step = logits[same][0].float()
    return (step[eager[same]] - step[ours[same]]).item()
