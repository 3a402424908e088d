#!/usr/bin/env python3
"""Forward and backward with PyTorch on the CPU over the rows that `captured_batch` wrote.

    PYTHON rows-torch.py ROWS.json CONFIG.json [THREADS]

The plain Llama of the shared training probe with the shape of CONFIG.json, one row at a time (no
padding is computed), the loss over all its tokens, best of three. Needs `torch` only.
"""
import json
import resource
import sys
import time

import torch
import torch.nn as nn
import torch.nn.functional as F


class Layer(nn.Module):
    def __init__(self, width, inner, heads, key_heads, size):
        super().__init__()
        self.heads, self.key_heads, self.size = heads, key_heads, size
        self.qkv = nn.Linear(width, (heads + 2 * key_heads) * size, False)
        self.out = nn.Linear(heads * size, width, False)
        self.up, self.down = nn.Linear(width, 2 * inner, False), nn.Linear(inner, width, False)
        self.before, self.between = nn.RMSNorm(width), nn.RMSNorm(width)

    def forward(self, x, cosine, sine):
        length = x.shape[0]
        y = self.qkv(self.before(x)).view(length, -1, self.size).transpose(0, 1)
        q, k, v = y.split([self.heads, self.key_heads, self.key_heads])

        def turn(z):
            a, b = z.chunk(2, -1)
            return torch.cat([a * cosine - b * sine, b * cosine + a * sine], -1)

        att = F.scaled_dot_product_attention(
            turn(q)[None], turn(k)[None], v[None], is_causal=True, enable_gqa=True
        )[0]
        x = x + self.out(att.transpose(0, 1).reshape(length, -1))
        gate, wide = self.up(self.between(x)).chunk(2, -1)
        return x + self.down(F.silu(gate) * wide)


class Llama(nn.Module):
    def __init__(self, config):
        super().__init__()
        width, heads = config["hidden_size"], config["num_attention_heads"]
        self.size = config.get("head_dim") or width // heads
        self.table = nn.Embedding(config["vocab_size"], width)
        self.layers = nn.ModuleList(
            Layer(width, config["intermediate_size"], heads, config["num_key_value_heads"], self.size)
            for _ in range(config["num_hidden_layers"])
        )
        self.last = nn.RMSNorm(width)

    def forward(self, ids):
        half = self.size // 2
        angle = torch.arange(len(ids)).float()[:, None] * 1e4 ** (-torch.arange(half).float() / half)
        cosine, sine = angle.cos(), angle.sin()
        x = self.table(ids)
        for layer in self.layers:
            x = layer(x, cosine, sine)
        return F.linear(self.last(x), self.table.weight)


def main():
    rows = [torch.tensor(row) for row in json.load(open(sys.argv[1]))]
    torch.set_num_threads(int(sys.argv[3]) if len(sys.argv) > 3 else 1)
    torch.manual_seed(1)
    model = Llama(json.load(open(sys.argv[2])))
    best = (float("inf"),) * 2
    for _ in range(3):
        wall, processor = time.perf_counter(), time.process_time()
        model.zero_grad()
        for row in rows:
            loss = F.cross_entropy(model(row[:-1]), row[1:], reduction="sum") * 1e-4
            loss.backward()
        found = time.perf_counter() - wall, time.process_time() - processor
        best = tuple(min(a, b) for a, b in zip(best, found))
    tokens = sum(map(len, rows))
    print(
        f"PyTorch rows: {tokens} tokens, {best[0]:.2f} s wall, {best[1]:.2f} s of processor, "
        f"peak {resource.getrusage(resource.RUSAGE_SELF).ru_maxrss // 1024} MB"
    )


main()
