"""Calls of the Hopper backward: in the emulator and on a GPU."""

from __future__ import annotations

CASES = {  # head dimensions, (batch, seqlen_q, seqlen_k, heads, heads_kv), options
    "64": (64, 64, (2, 256, 256, 2, 2), {}),
    "64 causal, odd": (64, 64, (1, 301, 333, 2, 2), {"causal": True}),
    "64 window, more queries": (64, 64, (1, 391, 259, 2, 2), {"window": (70, 31)}),
    "64 grouped": (64, 64, (1, 200, 190, 4, 2), {"causal": True}),
    "64 deterministic": (64, 64, (2, 260, 300, 2, 2), {"causal": True, "deterministic": True}),
    "64 seqused, grouped": (64, 64, (3, 150, 340, 4, 2), {"seqused_q": (150, 0, 66), "seqused_k": (1, 30, 340)}),
    "64 softcap, dropout, fp16": (64, 64, (1, 150, 150, 2, 2), {"softcap": 3.0, "dropout_p": 0.3}),
    "32": (32, 32, (1, 150, 140, 2, 1), {"causal": True, "deterministic": True}),
    "24/56 window": (24, 56, (1, 150, 300, 1, 1), {"window": (20, None)}),
    "128": (128, 128, (1, 256, 256, 2, 2), {}),
    "128 causal, odd": (128, 128, (1, 201, 333, 2, 2), {"causal": True}),
    "128 more queries": (128, 128, (1, 391, 100, 1, 1), {"causal": True}),
    "128 window, deterministic": (128, 128, (2, 200, 300, 2, 2), {"window": (70, 31), "deterministic": True}),
    "128 grouped, deterministic": (128, 128, (1, 140, 190, 6, 2), {"causal": True, "deterministic": True}),
    "128 packed": (128, 128, (None, 313, 362, 2, 2), {"q": (100, 0, 204), "k": (160, 10, 190), "causal": True}),
    "128 seqused": (128, 128, (3, 150, 140, 2, 2), {"seqused_q": (150, 0, 66), "seqused_k": (1, 30, 140)}),
    "128 softcap, dropout, fp16": (128, 128, (1, 150, 150, 2, 1), {"softcap": 3.0, "dropout_p": 0.3, "window": (9, 9)}),
    "96": (96, 96, (1, 150, 260, 2, 2), {"causal": True}),
    "88/40 packed, grouped": (88, 40, (None, 213, 209, 4, 2), {"q": (100, 0, 104), "k": (60, 10, 130)}),
    "64/128 causal": (64, 128, (1, 190, 150, 1, 1), {"causal": True}),
    "192/128": (192, 128, (1, 150, 230, 2, 2), {"causal": True}),
    "192/128 grouped, deterministic": (192, 128, (1, 140, 130, 4, 2), {"causal": True, "deterministic": True}),
    "136/64 window, softcap, fp16": (136, 64, (1, 150, 150, 2, 2), {"window": (40, 70), "softcap": 3.0}),
    "256": (256, 256, (1, 150, 140, 2, 2), {}),
    "256 grouped, deterministic": (256, 256, (1, 129, 129, 4, 2), {"window": (50, 20), "deterministic": True}),
    "248/136 packed, grouped": (248, 136, (None, 213, 209, 2, 1), {"q": (100, 0, 104), "k": (60, 10, 130)}),
    "64/192 seqused": (64, 192, (3, 150, 140, 2, 2), {"seqused_q": (150, 0, 66), "seqused_k": (1, 30, 140)}),
}
