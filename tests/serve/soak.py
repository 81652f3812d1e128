"""Good and hostile clients at a server, and whether the good ones notice.

    python -m tests.serve.soak --requests 20000

The server runs in a process of its own, on the CPU, with a tiny random model. First good clients
alone, which gives the quiet latency; then 70 % good requests and 30 % hostile ones: fuzzed bodies,
clients that leave, requests that never end, and bursts of more than the server takes.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import random
import tempfile
import time
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path

import click

from tests.serve.server_process import Client, ServerProcess, request, serving

GOOD_CLIENTS, BURST, MOST_REQUESTS = 8, 16, 16
FLAGS = f"--num-pages 256 --max-requests {MOST_REQUESTS} --request-timeout 2 --max-connections 64"
COMPLETIONS, CHAT = "/v1/completions", "/v1/chat/completions"
TOKENS = 4


@dataclass
class Soak:
    """Counts of what happened.

    Attributes
    ----------
    quiet, loaded : list of float
        Seconds of good requests, alone and beside hostile ones.
    statuses : Counter
        Number of hostile requests, by kind and status.
    memory : dict
        Resident bytes of the server after so many requests.
    faults : list of str
        What should not have happened.
    """

    quiet: list[float] = field(default_factory=list)
    loaded: list[float] = field(default_factory=list)
    statuses: Counter[str] = field(default_factory=Counter)
    memory: dict[int, int] = field(default_factory=dict)
    faults: list[str] = field(default_factory=list)
    retries: int = 0
    hostile: int = 0

    @property
    def ratio(self) -> float:
        """99th percentile beside hostile clients over the quiet one."""
        return percentile(self.loaded) / percentile(self.quiet)

    def report(self) -> str:
        """Lines for people."""
        memory = ", ".join(f"{n}: {size >> 20}" for n, size in self.memory.items())
        times = [
            f"{name}: {len(seconds)} good requests, median {percentile(seconds, 50) * 1e3:.0f} ms, "
            f"p99 {percentile(seconds) * 1e3:.0f} ms"
            for name, seconds in (("quiet", self.quiet), ("loaded", self.loaded))
        ]
        return "\n".join(
            [
                *times,
                f"ratio of p99: {self.ratio:.2f}; {self.retries} retries after a 503",
                f"{self.hostile} hostile requests: {dict(sorted(self.statuses.items()))}",
                f"MiB of the server after requests: {memory}",
                f"faults: {self.faults[:10]}",
            ]
        )


def percentile(values: list[float], percent: int = 99) -> float:
    """Percentile of a list that is not empty."""
    return sorted(values)[min(len(values) - 1, len(values) * percent // 100)]


class Crowd:
    """Clients of a server.

    Parameters
    ----------
    server : ServerProcess
        Whom they ask.
    rng : random.Random
        The work of the clients.
    """

    def __init__(self, server: ServerProcess, rng: random.Random) -> None:
        self.server, self.rng = server, rng
        self.soak = Soak()
        self.sent = 0
        self.began = time.perf_counter()
        self._held: set[asyncio.Task[None]] = set()

    async def good(self, count: int, times: list[float], hostile_share: float = 0.0) -> None:
        """So many requests, good ones and hostile ones beside them."""
        left = count

        async def client() -> None:
            nonlocal left
            connection = Client(self.server.port)
            while left > 0:
                left -= 1
                await self._note()
                if self.rng.random() < hostile_share:
                    await self._hostile()
                    continue
                begin = time.perf_counter()
                await self._good(connection)
                times.append(time.perf_counter() - begin)
            connection.close()

        await asyncio.gather(*(client() for _ in range(GOOD_CLIENTS)))
        await asyncio.gather(*self._held)

    async def _note(self) -> None:
        self.sent += 1
        if self.sent % 2000 == 0:
            self.soak.memory[self.sent] = self.server.memory()
            click.echo(f"{self.sent} requests, {time.perf_counter() - self.began:.0f} s", err=True)

    async def _good(self, connection: Client) -> None:
        prompt = "x" * self.rng.randint(1, 40)
        body = {"prompt": prompt, "max_tokens": TOKENS, "seed": 1, "ignore_eos": True}
        for _ in range(200):
            status, answer = await connection.ask(COMPLETIONS, body)
            if status != 503:
                break
            self.soak.retries += 1
            await asyncio.sleep(0.02)
        if status != 200 or json.loads(answer)["usage"]["completion_tokens"] != TOKENS:
            self.soak.faults.append(f"a good request: {status} {answer[:200]!r}")

    async def _hostile(self) -> None:
        kind = self.rng.choice([self._fuzz, self._leave, self._half, self._burst])
        task = asyncio.create_task(self._guarded(kind))
        self._held.add(task)
        task.add_done_callback(self._held.discard)
        if kind is not self._half:  # which the server ends
            await task

    async def _guarded(self, kind) -> None:
        name = kind.__name__[1:]
        try:
            for status in await asyncio.wait_for(kind(), 60):
                self.soak.hostile += 1
                self.soak.statuses[f"{name} {status}"] += 1
                if status == 500:
                    self.soak.faults.append(f"{name}: 500")
        except (ConnectionError, asyncio.IncompleteReadError):
            self.soak.hostile += 1
            self.soak.statuses[f"{name} closed"] += 1
        except asyncio.TimeoutError:
            self.soak.faults.append(f"{name}: no answer")

    async def _fuzz(self) -> list[int]:
        """A body that is nearly a request."""
        rng = self.rng
        body: dict = {
            "prompt": "fuzz",
            "max_tokens": 1,
            "messages": [{"role": "user", "content": "x"}],
        }
        body.pop(rng.choice(["prompt", "messages", "messages"]))
        names = [
            "stop",
            "seed",
            "top_p",
            "temperature",
            "n",
            "logprobs",
            "stream",
            "model",
            "tools",
        ]
        values = [
            None,
            True,
            -1,
            1e308,
            2**70,
            "",
            "\ud800",
            [],
            [[]],
            {},
            {"\ud800": 1},
            "s" * 9999,
        ]
        for name in rng.sample(names, rng.randint(0, 3)):
            body[name] = rng.choice(values)
        data = bytearray(json.dumps(body).encode())
        if rng.random() < 0.5:
            for _ in range(rng.randint(1, 6)):
                data[rng.randrange(len(data))] = rng.randrange(256)
        if rng.random() < 0.1:
            data = bytearray(b"[" * rng.randint(1, 100_000))
        client = Client(self.server.port)
        try:
            return [(await client.ask(rng.choice([COMPLETIONS, CHAT]), bytes(data)))[0]]
        finally:
            client.close()

    async def _leave(self) -> list[int]:
        """Leaves before the answer, or in the middle of it."""
        reader, writer = await asyncio.open_connection("127.0.0.1", self.server.port)
        body = {"prompt": "leave", "max_tokens": 200, "stream": self.rng.random() < 0.7}
        writer.write(request(COMPLETIONS, body))
        with contextlib.suppress(asyncio.TimeoutError):
            await asyncio.wait_for(reader.read(self.rng.randint(1, 500)), self.rng.random() / 20)
        writer.transport.abort()
        return [0]

    async def _half(self) -> list[int]:
        """A part of a request, until the server ends the connection."""
        reader, writer = await asyncio.open_connection("127.0.0.1", self.server.port)
        whole = request(COMPLETIONS, {"prompt": "half" * 10, "max_tokens": 1})
        writer.write(whole[: self.rng.randint(0, len(whole) - 1)])
        answer = await reader.read(1 << 16)
        writer.close()
        return [int(answer.split()[1]) if answer else 0]

    async def _burst(self) -> list[int]:
        """More requests at a time than the server takes."""
        clients = [Client(self.server.port) for _ in range(BURST)]
        body = {"prompt": "burst", "max_tokens": 1}
        # A burst counts as many requests; its share is that of the others.
        if self.rng.random() > 1 / BURST:
            clients = clients[:1]
        answers = await asyncio.gather(*(client.ask(COMPLETIONS, body) for client in clients))
        for client in clients:
            client.close()
        return [status for status, _ in answers]

    async def check_end(self) -> None:
        """The server must have nothing left to do, and all of its pages."""
        client = Client(self.server.port)
        for _ in range(100):
            stats = json.loads((await client.ask("/stats"))[1])
            if stats["running"] == stats["waiting"] == 0:
                break
            await asyncio.sleep(0.1)
        client.close()
        if stats["pages_free"] != stats["pages_total"] or stats["running"] or stats["waiting"]:
            self.soak.faults.append(f"left behind: {stats}")
        if "Traceback" in (log := self.server.log.read_text()):
            self.soak.faults.append(f"the log: {log[-2000:]}")


def soak(requests: int, log: Path, seed: int = 0) -> Soak:
    """Run `requests` requests, a fifth as many alone before them."""

    async def run(server: ServerProcess) -> Soak:
        crowd = Crowd(server, random.Random(seed))
        await crowd.good(max(requests // 50, 20), [])  # shapes that were not seen before
        await crowd.good(max(requests // 10, 40), crowd.soak.quiet)
        crowd.sent = 0
        await crowd.good(requests, crowd.soak.loaded, hostile_share=0.3)
        crowd.soak.memory[requests] = server.memory()
        # Machines change: the quiet latency before and after is one list.
        await crowd.good(max(requests // 10, 40), crowd.soak.quiet)
        await crowd.check_end()
        return crowd.soak

    with serving(log, *FLAGS.split()) as server:
        return asyncio.run(run(server))


@click.command()
@click.option("--requests", default=20_000, help="Good and hostile ones.")
@click.option("--seed", default=0)
def main(requests: int, seed: int) -> None:
    """Soak the server, print what happened, and fail if the good clients noticed."""
    with tempfile.TemporaryDirectory() as folder:
        result = soak(requests, Path(folder) / "log", seed)
    click.echo(result.report())
    first, last = (result.memory[n] for n in (min(result.memory), max(result.memory)))
    if result.faults or result.ratio > 2 or last > 1.1 * first:
        raise click.ClickException("hostile clients cost too much")


if __name__ == "__main__":
    main()
