#!/usr/bin/env python3
"""Decoding with PyTorch on the CPU: the counterpart of `cargo run -p model --example decode`.

    PYTHON decode-torch.py [SHAPE] [THREADS] [PROMPT] [NEW] [BATCH...]

A plain Llama of the same shape (random weights, f32), keys and values in buffers that are allocated
once, scaled-dot-product attention, logits of the last position only, tokens drawn from the softmax.
No Python object per token but the step itself. Needs `torch` only. Prints the rates of reading the
prompts and of drawing, best of three, by the wall clock and per processor second.
"""
import sys
import time

import torch
import torch.nn.functional as F

SHAPES = {  # vocabulary, width, inner width, layers, heads, key heads
    "tiny5m": (4096, 192, 512, 8, 6, 2),
    "smollm2": (49152, 576, 1536, 30, 9, 3),
}


class Llama:
    def __init__(self, vocabulary, width, inner, layers, heads, key_heads):
        torch.manual_seed(1)
        draw = lambda *shape: torch.randn(*shape) * 0.02
        self.heads, self.key_heads, self.size = heads, key_heads, width // heads
        self.table = draw(vocabulary, width)
        own = lambda: (
            torch.ones(width),
            draw((heads + 2 * key_heads) * self.size, width),
            draw(width, width),
            torch.ones(width),
            draw(2 * inner, width),
            draw(width, inner),
        )
        self.layers = [own() for _ in range(layers)]
        self.last = torch.ones(width)

    def buffers(self, batch, length):
        shape = (batch, self.key_heads, length, self.size)
        return [(torch.zeros(shape), torch.zeros(shape)) for _ in self.layers]

    def rotary(self, x, start):
        half = self.size // 2
        frequency = 1e4 ** (-torch.arange(half).float() / half)
        angle = torch.arange(start, start + x.shape[2])[:, None].float() * frequency
        cosine, sine = angle.cos(), angle.sin()
        a, b = x[..., :half], x[..., half:]
        return torch.cat([a * cosine - b * sine, b * cosine + a * sine], -1)

    def forward(self, ids, start, buffers):
        batch, length = ids.shape
        x = self.table[ids]
        end = start + length
        for (norm, qkv, out, norm_inner, up, down), (keys, values) in zip(self.layers, buffers):
            y = F.linear(F.rms_norm(x, norm.shape, norm, 1e-5), qkv)
            y = y.view(batch, length, -1, self.size).transpose(1, 2)
            q, k, v = y.split([self.heads, self.key_heads, self.key_heads], 1)
            keys[:, :, start:end] = self.rotary(k, start)
            values[:, :, start:end] = v
            att = F.scaled_dot_product_attention(
                self.rotary(q, start),
                keys[:, :, :end],
                values[:, :, :end],
                is_causal=length > 1,
                enable_gqa=True,
            )
            x = x + F.linear(att.transpose(1, 2).reshape(batch, length, -1), out)
            gate, wide = F.linear(F.rms_norm(x, norm_inner.shape, norm_inner, 1e-5), up).chunk(2, -1)
            x = x + F.linear(F.silu(gate) * wide, down)
        x = F.rms_norm(x[:, -1], self.last.shape, self.last, 1e-5)
        return F.linear(x, self.table)


def seconds(work):
    wall, processor = time.perf_counter(), time.process_time()
    work()
    return time.perf_counter() - wall, time.process_time() - processor


@torch.inference_mode()
def main():
    given = sys.argv[1:]
    at = lambda index, other: given[index] if len(given) > index else other
    shape, threads = at(0, "tiny5m"), int(at(1, "1"))
    prompt, new = int(at(2, "128")), int(at(3, "64"))
    batches = [int(n) for n in given[4:]] or [1, 8, 32]
    torch.set_num_threads(threads)
    model = Llama(*SHAPES[shape])
    vocabulary = SHAPES[shape][0]
    for batch in batches:
        ids = torch.randint(vocabulary, (batch, prompt))
        best = [(float("inf"),) * 2] * 2
        for _ in range(3):
            buffers = model.buffers(batch, prompt + new + 1)
            state = {}

            def read():
                state["logits"] = model.forward(ids, 0, buffers)

            def draw():
                logits = state["logits"]
                for step in range(new):
                    chosen = torch.multinomial(logits.softmax(-1), 1)
                    logits = model.forward(chosen, prompt + step, buffers)

            for i, work in enumerate((read, draw)):
                found = seconds(work)
                best[i] = tuple(min(a, b) for a, b in zip(best[i], found))
        (read, read_cpu), (drawn, drawn_cpu) = best
        print(
            f"batch {batch:>2}: prompt {batch * prompt / read:>7.0f} tokens/s wall"
            f" {batch * prompt / read_cpu:>7.0f} per processor second,"
            f" drawn {batch * new / drawn:>6.0f} wall {batch * new / drawn_cpu:>6.0f} per processor second"
        )


main()
