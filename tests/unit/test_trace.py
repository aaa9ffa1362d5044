"""Kernels by family, on names as PyTorch, cuBLAS, cuDNN, FlashAttention and Inductor give them."""

import csv
import gzip
import json

import pytest
from test_records import EXECUTION, RECIPE

from speedproof.data.loader import SyntheticBatches
from speedproof.measure import trace
from speedproof.measure.trace import FAMILIES, by_family, family, kernel_spans

NAMES = {
    "matmul": [
        "nvjet_hsh_128x256_64x4_1x2_h_bz_coopA_NNT",
        "nvjet_tst_192x192_64x4_2x1_v_bz_TNT",
        "sm90_xmma_gemm_bf16bf16_bf16f32_f32_tn_n_tilesize128x128x64_warpgroupsize1x1x1_execute_segment_k_off_kernel__5x_cublas",
        "ampere_bf16_s16816gemm_bf16_128x128_ldg8_f2f_stages_32x5_nt",
        "void cutlass::Kernel2<cutlass_80_tensorop_bf16_s16816gemm_relu_bf16_256x128_32x3_tn_align8>(cutlass::Params)",
        "void cublasLt::splitKreduce_kernel<32, 16, int, __nv_bfloat16, __nv_bfloat16, float>",
        "void gemv2T_kernel_val<int, int, __nv_bfloat16, float>",
        "triton_tem_fused_mm_3",
        "aten::mm",
        "aten::addmm",
        "aten::matmul",
        "mkl::_mkl_linear",
    ],
    "attention": [
        "void pytorch_flash::flash_fwd_kernel<Flash_fwd_kernel_traits<64, 128, 128, 4, false, cutlass::bfloat16_t>>",
        "void pytorch_flash::flash_bwd_dq_dk_dv_loop_seqk_parallel_kernel<Flash_bwd_kernel_traits<64, 128, 128, 8>>",
        "void pytorch_flash::flash_bwd_dot_do_o_kernel<true, Flash_bwd_kernel_traits<64>>",
        "cudnn_generated_fort_native_sdpa_sm90_flash_fprop_wgmma_f16_knob_7_64x128x64_4x1x1_kernel0_0",
        "fmha_cutlassF_bf16_aligned_64x64_rf_sm80(PyTorchMemEffAttention::AttentionKernel::Params)",
        "aten::_scaled_dot_product_flash_attention_for_cpu",
        "aten::_scaled_dot_product_flash_attention_for_cpu_backward",
        "aten::_flash_attention_forward",
    ],
    "cross-entropy": [
        "triton_red_fused__log_softmax__to_copy_nll_loss_forward_5",
        "_cross_entropy_row",
        "triton_red_fused__log_softmax__log_softmax_backward_data__to_copy_nll_loss_backward_nll_loss_forward_6",
        "triton_per_fused__log_softmax_nll_loss_forward_7",
        "triton_red_fused__to_copy_logsumexp_0",
        "void (anonymous namespace)::cunn_SoftMaxForward<4, float, float, float, LogSoftMaxForwardEpilogue>",
        "void (anonymous namespace)::cunn_SoftMaxBackward<4, float, float, float, LogSoftMaxBackwardEpilogue>",
        "void at::native::(anonymous namespace)::nll_loss_forward_reduce_cuda_kernel_2d<float, float, long>",
        "aten::_log_softmax",
        "aten::nll_loss_forward",
        "aten::cross_entropy_loss",
    ],
    "RoPE": [
        "triton_poi_fused_arange_cat_cos_mul_pow_sin_sub_2",
        "triton_poi_fused__to_copy_add_cat_mul_sub_4",
        "void at::native::vectorized_elementwise_kernel<4, at::native::cos_kernel_cuda(at::TensorIteratorBase&)>",
        "void at::native::vectorized_elementwise_kernel<4, at::native::sin_kernel_cuda(at::TensorIteratorBase&)>",
        "void (anonymous namespace)::CatArrayBatchedCopy<at::native::OpaqueType<2u>, unsigned int, 4, 64, 64>",
        "aten::cat",
        "aten::cos",
    ],
    "norm": [
        "triton_per_fused__to_copy_add_mean_mul_pow_rsqrt_1",
        "triton_red_fused__to_copy_add_div_expand_mul_pow_rsqrt_sum_9",
        "void at::native::vectorized_elementwise_kernel<4, at::native::rsqrt_kernel_cuda(at::TensorIteratorBase&)>",
        "void at::native::reduce_kernel<512, 1, at::native::ReduceOp<float, at::native::MeanOps<float, float, float>>>",
        "void at::native::vectorized_elementwise_kernel<4, void at::native::pow_tensor_scalar_kernel_impl<float>>",
        "aten::rsqrt",
        "aten::mean",
        "aten::rms_norm",
    ],
    "optimizer": [
        "void (anonymous namespace)::multi_tensor_apply_kernel<FusedOptimizerTensorListMetadata<4>, FusedAdamMath>",
        "void (anonymous namespace)::multi_tensor_apply_kernel<TensorListMetadata<1>, LpNormFunctor<float>>",
        "void at::native::lpnorm_cleanup<float, (at::native::NormType)1, float, float, 1>",
        "aten::_fused_adamw_",
        "aten::_foreach_norm",
        "aten::linalg_vector_norm",
    ],
    "copy": [
        "Memcpy HtoD (Pinned -> Device)",
        "Memset (Device)",
        "void at::native::unrolled_elementwise_kernel<at::native::direct_copy_kernel_cuda()>",
        "void at::native::vectorized_elementwise_kernel<4, at::native::bfloat16_copy_kernel_cuda()>",
        "triton_poi_fused__to_copy_0",
        "triton_poi_fused__unsafe_view_clone_transpose_11",
        "aten::copy_",
    ],
    "other": [
        "triton_poi_fused_mul_silu_8",
        "triton_poi_fused_embedding_0",
        "triton_poi_fused__to_copy_mul_silu_backward_3",
        "void at::native::vectorized_elementwise_kernel<4, at::native::(anonymous namespace)::silu_kernel>",
        "void at::native::(anonymous namespace)::indexSelectLargeIndex<float, long, unsigned int, 2, 2, -2, true>",
        "aten::mul",
        "aten::silu",
    ],
}


@pytest.mark.parametrize(("expected", "name"), [(f, name) for f, names in NAMES.items() for name in names])
def test_family_of_a_name(expected, name):
    assert family(name) == expected


def test_families_are_all_covered():
    assert tuple(NAMES) == FAMILIES


EVENTS = [
    {"cat": "cpu_op", "name": "aten::mm", "dur": 999.0},
    {"cat": "kernel", "name": "nvjet_hsh_128x256", "dur": 30.0},
    {"cat": "kernel", "name": "nvjet_hsh_128x256", "dur": 30.0},
    {"cat": "kernel", "name": "triton_poi_fused_mul_silu_8", "dur": 6.0},
    {"cat": "gpu_memcpy", "name": "Memcpy HtoD (Pinned -> Device)", "dur": 3.0},
    {"cat": "gpu_user_annotation", "name": "Optimizer.step#AdamW.step", "dur": 500.0},
    {"ph": "M", "name": "process_name"},
]


def test_kernel_time_is_per_update_and_leaves_out_what_is_no_kernel():
    found = by_family(kernel_spans(EVENTS), updates=3)
    assert found["ms_per_update"] == pytest.approx(0.023)
    assert found["families"]["matmul"] == {
        "ms_per_update": pytest.approx(0.02),
        "calls_per_update": pytest.approx(2 / 3),
    }
    assert found["families"]["copy"]["ms_per_update"] == pytest.approx(0.001)
    assert [row["name"][:5] for row in found["longest"]] == ["nvjet", "trito", "Memcp"]
    assert sum(row["ms_per_update"] for row in found["families"].values()) == pytest.approx(found["ms_per_update"])


@pytest.fixture(scope="module")
def profiled(tmp_path_factory):
    from speedproof.training.update import Updater

    folder = tmp_path_factory.mktemp("profile")
    return folder, trace.profile(Updater(RECIPE, EXECUTION, "cpu"), SyntheticBatches(RECIPE, 1), 2, folder)


def test_profile_of_updates_on_cpu(profiled):
    folder, found = profiled
    assert found["updates"] == 2
    assert found["kernels_per_update"] is None
    assert "no GPU kernels" in found["reason"]
    for name in ("matmul", "attention", "cross-entropy", "RoPE", "norm", "optimizer"):
        assert found["families"][name]["ms_per_update"] > 0, name
    # Two microbatches of 7 projections and the head, each one forward and two backward products.
    assert found["families"]["matmul"]["calls_per_update"] >= 48
    events = json.loads(gzip.decompress((folder / trace.TRACE_FILE).read_bytes()))["traceEvents"]
    assert any(event.get("name") == "aten::mm" for event in events)
    rows = list(csv.DictReader((folder / trace.OPERATORS_FILE).open()))
    assert {"operator", "family", "calls", "self_cpu_us", "self_device_us"} == set(rows[0])
    assert not (folder / "trace.json").exists()


def test_trace_above_the_cap_is_left_out_with_a_reason(tmp_path, monkeypatch):
    monkeypatch.setattr(trace, "MAX_TRACE_BYTES", 10)
    (tmp_path / "raw").write_text("x" * 1000)
    found = trace._compress(tmp_path / "raw", tmp_path / "packed")
    assert found["file"] is None
    assert "above the cap of 10" in found["reason"]
    assert not list(tmp_path.iterdir())
