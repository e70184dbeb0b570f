"""Every refusal: the kind of exception, and a text that names the argument, what it got and what is allowed."""

import math
from typing import Any

import pytest
import torch
from torch import Tensor

import refluent as rf
from refluent import backends, values

B, SQ, SK, H, HKV, D, DV = 2, 5, 7, 4, 2, 16, 8
CU_Q = torch.tensor([0, 2, 5], dtype=torch.int32)
CU_K = torch.tensor([0, 3, 7], dtype=torch.int32)


def tensors() -> dict[str, Tensor]:
    return {"q": torch.randn(B, SQ, H, D), "k": torch.randn(B, SK, HKV, D), "v": torch.randn(B, SK, HKV, DV)}


def packed() -> dict[str, Any]:
    q, k, v = torch.randn(SQ, H, D), torch.randn(SK, HKV, D), torch.randn(SK, HKV, DV)
    return {"q": q, "k": k, "v": v, "cu_seqlens_q": CU_Q, "cu_seqlens_k": CU_K}


def refused(function: Any, arguments: dict[str, Any], kind: type[Exception], text: str) -> None:
    """The exact text, and none of the caller's tensors changed."""
    given = [value for value in arguments.values() if isinstance(value, Tensor) and value.device.type == "cpu"]
    before = [value.clone() for value in given]
    first = [arguments.pop(name) for name in ("do", "q", "k", "v", "o", "lse") if name in arguments]
    with pytest.raises(kind) as caught:
        function(*first, **arguments)
    assert type(caught.value) is kind
    assert str(caught.value) == text
    for value, old in zip(given, before):
        torch.testing.assert_close(value, old, rtol=0, atol=0)


NUMBER = "a finite number, or None for 1 / sqrt(head_dim)"
CAP = "a finite number >= 0 (0 or None: off)"
RATE = "a number with 0 <= dropout_p < 1"
FLAG = "True or False"
SEED = "an int in [-2**63, 2**63), or an int64 tensor of one element on cpu"
FLOATS = "bfloat16, float16, float32 or float64"


@pytest.mark.parametrize(
    ("name", "value", "kind", "text"),
    [
        ("scale", "1", TypeError, f"scale: got str '1'; allowed: {NUMBER}"),
        ("scale", True, TypeError, f"scale: got bool True; allowed: {NUMBER}"),
        ("scale", [1.0], TypeError, f"scale: got list [1.0]; allowed: {NUMBER}"),
        ("scale", math.nan, ValueError, f"scale: got nan; allowed: {NUMBER}"),
        ("scale", math.inf, ValueError, f"scale: got inf; allowed: {NUMBER}"),
        ("softcap", -1, ValueError, f"softcap: got -1.0; allowed: {CAP}"),
        ("softcap", math.inf, ValueError, f"softcap: got inf; allowed: {CAP}"),
        ("softcap", "x", TypeError, f"softcap: got str 'x'; allowed: {CAP}"),
        ("dropout_p", 1.0, ValueError, f"dropout_p: got 1.0; allowed: {RATE}"),
        ("dropout_p", -0.1, ValueError, f"dropout_p: got -0.1; allowed: {RATE}"),
        ("dropout_p", math.nan, ValueError, f"dropout_p: got nan; allowed: {RATE}"),
        ("dropout_p", None, TypeError, f"dropout_p: got NoneType None; allowed: {RATE}"),
        ("causal", 1, TypeError, f"causal: got int 1; allowed: {FLAG}"),
        ("deterministic", "yes", TypeError, f"deterministic: got str 'yes'; allowed: {FLAG}"),
        ("return_lse", 1, TypeError, f"return_lse: got int 1; allowed: {FLAG}"),
        ("return_max_score", None, TypeError, f"return_max_score: got NoneType None; allowed: {FLAG}"),
        ("layout", "sbhd", ValueError, "layout: got 'sbhd'; allowed: 'bshd' or 'bhsd'"),
        ("layout", None, ValueError, "layout: got None; allowed: 'bshd' or 'bhsd'"),
        ("dropout_seed", 3, ValueError, "dropout_seed: got 3; allowed: None while dropout_p is 0"),
        ("dropout_offset", 3, ValueError, "dropout_offset: got 3; allowed: None while dropout_p is 0"),
        ("score_mod", 3, TypeError, "score_mod: got int; allowed: a function or rf.score_mod(function)"),
        ("mask_mod", torch.ones(2), TypeError, "mask_mod: got Tensor; allowed: a function or rf.mask_mod(function)"),
    ],
)
def test_option(name: str, value: Any, kind: type[Exception], text: str) -> None:
    refused(rf.attention, tensors() | {name: value}, kind, text)


@pytest.mark.parametrize(
    ("window", "kind"),
    [(5, TypeError), ("ab", TypeError), ((1,), (TypeError, ValueError)), ((1.0, 0), TypeError), ((-2, 0), ValueError)],
)
def test_window(window: Any, kind: type[Exception]) -> None:
    with pytest.raises(kind, match="window"):
        rf.attention(**tensors(), window=window)


def test_bool_is_no_window() -> None:
    rf.attention(**tensors(), window=(1, 0))
    with pytest.raises(TypeError, match="window"):
        rf.attention(**tensors(), window=(True, 0))


@pytest.mark.parametrize(
    ("more", "kind", "text"),
    [
        ({"dropout_seed": 0.5}, TypeError, f"dropout_seed: got float 0.5; allowed: {SEED}"),
        ({"dropout_seed": 2**63}, ValueError, f"dropout_seed: got {2**63}; allowed: {SEED}"),
        ({"dropout_seed": 1, "dropout_offset": True}, TypeError, f"dropout_offset: got bool True; allowed: {SEED}"),
        (
            {"dropout_seed": torch.zeros(2, dtype=torch.int64)},
            ValueError,
            f"dropout_seed: got torch.int64 (2,) on cpu; allowed: {SEED}",
        ),
        (
            {"dropout_seed": torch.zeros((), dtype=torch.int32)},
            ValueError,
            f"dropout_seed: got torch.int32 () on cpu; allowed: {SEED}",
        ),
        ({"dropout_offset": 3}, ValueError, "dropout_offset: got 3; allowed: None while dropout_seed is None"),
    ],
)
def test_seed(more: dict[str, Any], kind: type[Exception], text: str) -> None:
    refused(rf.attention, tensors() | {"dropout_p": 0.5} | more, kind, text)


OPERAND = "(batch, seqlen, heads, head_dim)"
STRIDE = "last stride 1 (the head dimension contiguous; others free)"


@pytest.mark.parametrize(
    ("name", "value", "kind", "text"),
    [
        ("q", [1.0], TypeError, "q: got list; allowed: a torch.Tensor"),
        ("v", None, TypeError, "v: got NoneType; allowed: a torch.Tensor"),
        (
            "k",
            torch.eye(4).to_sparse(),
            TypeError,
            "k: got a tensor of layout torch.sparse_coo; allowed: a dense tensor (ragged: attention_varlen)",
        ),
        ("q", torch.ones(3), ValueError, f"q: got shape (3,); allowed: {OPERAND}"),
        ("k", torch.ones(2, 3, 16), ValueError, f"k: got shape (2, 3, 16); allowed: {OPERAND}"),
        ("q", torch.ones(2, 5, 4, 16).int(), ValueError, f"q: got type torch.int32; allowed: {FLOATS}"),
        (
            "k",
            torch.ones(2, 7, 2, 16).double(),
            ValueError,
            "k: got type torch.float64; allowed: q's type, torch.float32",
        ),
        ("v", torch.ones(2, 7, 2, 8).half(), ValueError, "v: got type torch.float16; allowed: q's type, torch.float32"),
        ("k", torch.ones(2, 7, 2, 16, device="meta"), ValueError, "k: got device meta; allowed: q's device, cpu"),
        ("q", torch.ones(2, 5, 4, 12), ValueError, "q: got head dimension 12; allowed: a multiple of 8 up to 256"),
        ("v", torch.ones(2, 7, 2, 264), ValueError, "v: got head dimension 264; allowed: a multiple of 8 up to 256"),
        ("v", torch.ones(2, 7, 2, 0), ValueError, "v: got head dimension 0; allowed: a multiple of 8 up to 256"),
        ("q", torch.ones(2, 5, 16, 4).mT, ValueError, f"q: got last stride 4; allowed: {STRIDE}"),
        ("v", torch.ones(2, 7, 2, 1).expand(-1, -1, -1, 8), ValueError, f"v: got last stride 0; allowed: {STRIDE}"),
        (
            "v",
            torch.ones(2, 6, 2, 8),
            ValueError,
            "v: got shape (2, 6, 2, 8); allowed: k's shape (2, 7, 2, 16) up to the last dimension",
        ),
        ("k", torch.ones(2, 7, 2, 32), ValueError, "k: got head dimension 32; allowed: q's, 16"),
        ("q", torch.ones(2, 5, 0, 16), ValueError, "q: got 0 heads; allowed: at least 1"),
        ("q", torch.ones(2, 5, 3, 16), ValueError, "k: got 2 heads; allowed: a divisor of q's 3 heads"),
        ("q", torch.ones(3, 5, 4, 16), ValueError, "k: got 2 sequences; allowed: 3, as q has"),
        ("sink", 1.0, TypeError, "sink: got float; allowed: a torch.Tensor"),
        ("sink", torch.ones(2), ValueError, "sink: got shape (2,); allowed: (q's heads,) = (4,)"),
        ("sink", torch.ones(4).int(), ValueError, f"sink: got type torch.int32; allowed: {FLOATS}"),
        ("sink", torch.ones(4, device="meta"), ValueError, "sink: got device meta; allowed: q's device, cpu"),
        ("seqused_q", [1, 2], TypeError, "seqused_q: got list; allowed: a torch.Tensor"),
        ("seqused_q", torch.tensor([1, 2]), ValueError, "seqused_q: got type torch.int64; allowed: int32"),
        ("seqused_k", torch.ones(3).int(), ValueError, "seqused_k: got shape (3,); allowed: (batch,) = (2,)"),
        (
            "seqused_k",
            torch.ones(2, dtype=torch.int32, device="meta"),
            ValueError,
            "seqused_k: got device meta; allowed: q's device, cpu",
        ),
        (
            "seqused_q",
            torch.tensor([1, 6]).int(),
            ValueError,
            "seqused_q: got 6 for sequence 1; allowed: 0 to its length, 5",
        ),
        (
            "seqused_k",
            torch.tensor([-1, 6]).int(),
            ValueError,
            "seqused_k: got -1 for sequence 0; allowed: 0 to its length, 7",
        ),
    ],
)
def test_tensor(name: str, value: Any, kind: type[Exception], text: str) -> None:
    refused(rf.attention, tensors() | {name: value}, kind, text)


def test_heads_of_k_without_any() -> None:
    more = {"k": torch.ones(B, SK, 0, D), "v": torch.ones(B, SK, 0, DV)}
    refused(rf.attention, tensors() | more, ValueError, "k: got 0 heads; allowed: a divisor of q's 4 heads")


def test_bhsd_needs_four_dimensions() -> None:
    arguments = tensors() | {"k": torch.ones(2, 7, 16), "layout": "bhsd"}
    text = "k: got shape (2, 7, 16); allowed: (batch, heads, seqlen, head_dim) with layout='bhsd'"
    refused(rf.attention, arguments, ValueError, text)


def cu(*starts: int) -> Tensor:
    return torch.tensor(starts, dtype=torch.int32)


BOUND = "an int >= 0 (a tensor would have to be read from the device)"


@pytest.mark.parametrize(
    ("more", "kind", "text"),
    [
        ({"q": torch.ones(1, SQ, H, D)}, ValueError, "q: got shape (1, 5, 4, 16); allowed: (tokens, heads, head_dim)"),
        ({"cu_seqlens_q": [0, 5]}, TypeError, "cu_seqlens_q: got list; allowed: a torch.Tensor"),
        ({"cu_seqlens_q": CU_Q.long()}, ValueError, "cu_seqlens_q: got type torch.int64; allowed: int32"),
        ({"cu_seqlens_q": CU_Q[None]}, ValueError, "cu_seqlens_q: got shape (1, 3); allowed: shape (batch + 1,)"),
        ({"cu_seqlens_k": cu()}, ValueError, "cu_seqlens_k: got shape (0,); allowed: shape (batch + 1,)"),
        ({"cu_seqlens_k": CU_K.to("meta")}, ValueError, "cu_seqlens_k: got device meta; allowed: q's device, cpu"),
        ({"cu_seqlens_k": cu(0, 7)}, ValueError, "cu_seqlens_k: got 1 sequences; allowed: 2, as cu_seqlens_q has"),
        ({"cu_seqlens_q": cu(1, 2, 5)}, ValueError, "cu_seqlens_q: got first element 1; allowed: 0"),
        (
            {"cu_seqlens_k": cu(0, 7, 6)},
            ValueError,
            "cu_seqlens_k: got 7 before 6 (elements 1, 2); allowed: no decrease",
        ),
        (
            {"cu_seqlens_q": cu(0, 2, 6)},
            ValueError,
            "cu_seqlens_q: got last element 6; allowed: at most the number of tokens, 5",
        ),
        ({"max_seqlen_q": 2}, ValueError, "max_seqlen_q: got 2; allowed: at least the longest sequence, 3"),
        ({"max_seqlen_k": -1}, ValueError, f"max_seqlen_k: got -1; allowed: {BOUND}"),
        ({"max_seqlen_k": torch.tensor(4)}, TypeError, f"max_seqlen_k: got Tensor; allowed: {BOUND}"),
        ({"seqused_k": cu(3, 5)}, ValueError, "seqused_k: got 5 for sequence 1; allowed: 0 to its length, 4"),
    ],
)
def test_varlen(more: dict[str, Any], kind: type[Exception], text: str) -> None:
    refused(rf.attention_varlen, packed() | more, kind, text)


def test_varlen_without_lengths() -> None:
    allowed = "a tensor for at least one of cu_seqlens_q and cu_seqlens_k (padded: attention)"
    refused(rf.attention_varlen, tensors(), ValueError, f"cu_seqlens_q: got None; allowed: {allowed}")


def test_bound_of_a_padded_side() -> None:
    arguments = packed() | {"cu_seqlens_q": None, "q": torch.ones(B, SQ, H, D), "max_seqlen_q": 5}
    refused(rf.attention_varlen, arguments, ValueError, "max_seqlen_q: got 5; allowed: None while cu_seqlens_q is None")


def test_arguments_are_keyword_only() -> None:
    with pytest.raises(TypeError, match="positional"):
        rf.attention(*tensors().values(), 1.0)  # type: ignore[call-overload]
    with pytest.raises(TypeError, match="positional"):
        rf.attention_varlen(torch.ones(5, 4, 16), *packed().values())  # type: ignore[call-overload]


def test_kind_of_mod() -> None:
    mask = rf.mask_mod(lambda b, h, i, j: j <= i)
    refused(
        rf.attention,
        tensors() | {"score_mod": mask},
        ValueError,
        "score_mod: got a mask_mod; allowed: a function or rf.score_mod(function)",
    )


def test_captured_device() -> None:
    slope = torch.ones(H, device="meta")
    refused(
        rf.attention,
        tensors() | {"score_mod": lambda s, b, h, i, j: s * slope[h]},
        ValueError,
        "score_mod: got captured tensor 'slope' on meta; allowed: q's device, cpu",
    )


def backward_arguments() -> dict[str, Any]:
    arguments = tensors()
    o, lse = rf.attention(**arguments, return_lse=True)
    return {"do": torch.ones_like(o), **arguments, "o": o, "lse": lse}


@pytest.mark.parametrize(
    ("more", "kind", "text"),
    [
        ({"do": None}, TypeError, "do: got NoneType; allowed: a torch.Tensor"),
        ({"do": torch.ones(B, SQ, H, D)}, ValueError, "do: got shape (2, 5, 4, 16); allowed: (2, 5, 4, 8)"),
        ({"o": torch.ones(B, SQ, H, DV).half()}, ValueError, "o: got type torch.float16; allowed: torch.float32"),
        ({"lse": torch.ones(B, SQ, H)}, ValueError, "lse: got shape (2, 5, 4); allowed: (2, 4, 5)"),
        ({"lse": torch.ones(B, H, SQ).double()}, ValueError, "lse: got type torch.float64; allowed: torch.float32"),
        ({"dlse": torch.ones(B, H)}, ValueError, "dlse: got shape (2, 4); allowed: (2, 4, 5)"),
        (
            {"dlse": torch.ones(B, H, SQ, device="meta")},
            ValueError,
            "dlse: got device meta; allowed: q's device, cpu",
        ),
        (
            {"layout": "bhsd", "cu_seqlens_q": CU_Q},
            ValueError,
            "layout: got 'bhsd' beside cu_seqlens; allowed: 'bshd' (packed tensors are (tokens, heads, head_dim))",
        ),
        (
            {"dropout_p": 0.5},
            ValueError,
            "dropout_seed: got None; allowed: the forward's seed while dropout_p is not 0",
        ),
    ],
)
def test_backward(more: dict[str, Any], kind: type[Exception], text: str) -> None:
    refused(rf.attention_backward, backward_arguments() | more, kind, text)


NAMES = "sm100, sm90, torch, emulate:sm100, emulate:sm90"


def test_backend_names() -> None:
    assert ", ".join(backends.names()) == NAMES
    refused(
        rf.attention,
        tensors() | {"backend": "cuda"},
        ValueError,
        f"backend: got 'cuda'; allowed: None or one of {NAMES}",
    )
    refused(rf.attention, tensors() | {"backend": 3}, TypeError, f"backend: got int; allowed: None or one of {NAMES}")


@pytest.mark.parametrize(("name", "family"), [("sm90", "Hopper"), ("sm100", "Blackwell")])
def test_backend_for_another_device(name: str, family: str) -> None:
    text = f"it needs tensors on a {family} GPU, got cpu; backend='emulate:{name}' runs its kernels on the CPU"
    refused(rf.attention, tensors() | {"backend": name}, rf.UnsupportedError, f"backend {name!r}: {text}")
    assert issubclass(rf.UnsupportedError, NotImplementedError)


def test_backend_that_does_not_serve_the_problem(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(
        backends.load("torch"), "supports", lambda problem: f"head dimension {problem.head_dim} is odd here"
    )
    arguments = {name: tensor[..., :8] for name, tensor in tensors().items()} | {"scale": 0.123}
    for backend in (None, "torch"):
        refused(
            rf.attention,
            arguments | {"backend": backend},
            rf.UnsupportedError,
            "backend 'torch': head dimension 8 is odd here",
        )


def test_a_refused_call_leaves_the_generator_alone() -> None:
    state = torch.get_rng_state()
    with pytest.raises(ValueError, match="softcap"):
        rf.attention(**tensors_of(1), dropout_p=0.5, softcap=-1)
    with pytest.raises(ValueError, match="sink"):
        rf.attention(**tensors_of(1), dropout_p=0.5, sink=torch.ones(1))
    assert torch.equal(state, torch.get_rng_state())


def tensors_of(value: float) -> dict[str, Tensor]:
    return {name: torch.full_like(tensor, value) for name, tensor in EXAMPLE.items()}


EXAMPLE = tensors()


table, pointer, wide = torch.zeros(SK), torch.tensor([0, 1, 2, 3, 4, 5, 99]), torch.zeros(SK + SQ)


class TestValidate:
    def test_accepts(self) -> None:
        assert rf.validate(**tensors(), causal=True) is None
        assert rf.validate(**packed(), max_seqlen_q=3, max_seqlen_k=4, seqused_k=cu(3, 0)) is None
        transposed = {name: tensor.transpose(1, 2) for name, tensor in tensors().items()}
        rf.validate(**transposed, layout="bhsd")

    def test_reads_lengths(self) -> None:
        with pytest.raises(ValueError, match="cu_seqlens_k: got 7 before 6"):
            rf.validate(**packed() | {"cu_seqlens_k": cu(0, 7, 6)})
        with pytest.raises(ValueError, match="seqused_q: got 9"):
            rf.validate(**tensors(), seqused_q=cu(9, 0))

    def test_checks_metadata_too(self) -> None:
        with pytest.raises(ValueError, match="softcap"):
            rf.validate(**tensors(), softcap=-1.0)

    @pytest.mark.parametrize(
        ("mod", "text"),
        [
            (lambda s, b, h, i, j: s + table[j], None),
            (lambda s, b, h, i, j: s + table[i - j], None),
            (lambda s, b, h, i, j: s + wide[i - j + SK], None),
            (lambda s, b, h, i, j: s + table[torch.where(j > 3, 3, j)] + table[2], None),
            (lambda s, b, h, i, j: s + table[pointer[i]], None),
            (lambda s, b, h, i, j: s + table[j + 1], "index 7 in dimension 0 of captured tensor 'table'"),
            (lambda s, b, h, i, j: s + table[-j - 2], "index -8 in dimension 0"),
            (lambda s, b, h, i, j: s + wide[j * 2], "index 12 in dimension 0 of captured tensor 'wide'"),
            (lambda s, b, h, i, j: s + table[pointer[j]], "index 99 in dimension 0"),
        ],
    )
    def test_reads_of_captured_tensors(self, mod: Any, text: str | None) -> None:
        if text is None:
            rf.validate(**tensors(), score_mod=mod)
            return
        with pytest.raises(ValueError, match=rf"^score_mod 'lambda': got {text}"):
            rf.validate(**tensors(), score_mod=mod)

    def test_reads_count_inside_the_lengths_alone(self) -> None:
        score = rf.score_mod(lambda s, b, h, i, j: s + table[pointer[j]])
        rf.validate(**tensors(), score_mod=score, seqused_k=cu(6, 0))
        rf.validate(**packed(), score_mod=score)
        with pytest.raises(ValueError, match="got index 99"):
            rf.validate(**tensors(), score_mod=score, seqused_k=cu(6, 7))
        with pytest.raises(ValueError, match="got index 99"):
            rf.validate(**packed() | {"cu_seqlens_k": cu(0, 0, 7)}, score_mod=score)

    def test_reads_of_masks(self) -> None:
        mask = rf.mask_mod(lambda b, h, i, j: pointer[j + i] > 2)
        with pytest.raises(ValueError, match=r"^mask_mod 'lambda': got index 10 in dimension 0 of captured tensor"):
            rf.validate(**tensors(), mask_mod=mask)
        small = torch.tensor([True, False])
        block_mask = rf.create_block_mask(lambda b, h, i, j: small[b], 2, None, SQ, SK, BLOCK_SIZE=16)
        rf.validate(**tensors(), block_mask=block_mask)
        three = {name: tensor.repeat(2, 1, 1, 1)[:3] for name, tensor in tensors().items()}
        single = rf.create_block_mask(rf.mask_mod(lambda b, h, i, j: small[b]), None, None, SQ, SK, BLOCK_SIZE=16)
        with pytest.raises(
            ValueError, match=r"^mask_mod 'lambda': got index 2 in dimension 0 of captured tensor 'small'"
        ):
            rf.validate(**three, block_mask=single)

    def test_strips(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(values, "POSITIONS_AT_ONCE", 2 * SK)
        score = rf.score_mod(lambda s, b, h, i, j: s + table[i + 3])
        with pytest.raises(ValueError, match="got index 7"):
            rf.validate(**tensors(), score_mod=score)

    def test_block_lists(self) -> None:
        block_mask = rf.create_block_mask(lambda b, h, i, j: j <= i, None, None, 64, 64, BLOCK_SIZE=16)
        block_mask.kv_indices[0, 0, 1, 0] = 77
        x = [torch.randn(1, 64, 2, 8) for _ in range(3)]
        for function in (rf.validate, rf.attention):
            with pytest.raises(ValueError, match="block_mask kv_indices must be between 0 and 3"):
                function(*x, block_mask=block_mask)
