#!/usr/bin/env bash
# Makes what the three calls of gpu.py need on a bare machine with Python 3.12, torch for CUDA 13, transformers and no
# network: OUT/training, OUT/engine and OUT/one_gpu, each of at most 64 MiB. Each call needs its own bundle and those
# before it, because vLLM alone is larger than one. On that machine, in the root of this repository:
#
#     bash OUT/training/unpack.sh /opt/trinity && PYTHONPATH=/opt/trinity python benchmarks/gpu.py --call training
#
# Left out: kernels of vLLM that Qwen2 does not use on a Hopper GPU (FlashAttention 2, experts, FlashMLA …) and its Rust
# server; Ray's jars, dashboard and libraries.
#
#     benchmarks/gpu_bundles.sh [OUT]        in a clone with .venv (requirements/install.sh); downloads about 1 GB
set -euo pipefail
cd "$(dirname "$0")/.."
out=$(realpath -m "${1:-gpu_bundles}") python=.venv/bin/python
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT

base="accelerate annotated-types antlr4-python3-runtime deepspeed einops hjson latex2sympy2-extended math-verify msgpack
omegaconf orjson psutil py-cpuinfo pydantic pydantic-core sqlalchemy typing-inspection xxhash"
vllm="aiohappyeyeballs aiohttp aiosignal annotated-doc anyio apache-tvm-ffi attrs blake3 cachetools cbor2 cloudpickle
compressed-tensors email-validator fastapi h11 httpcore2 httptools httpx2 ijson importlib-metadata
interegular jiter jsonschema jsonschema-specifications lark llguidance loguru mistral-common msgspec multidict
openai oss-harmony partial-json-parser pillow prometheus-client propcache protobuf pybase64 pydantic-extra-types
python-json-logger python-multipart pyzmq referencing regex rpds-py sentencepiece setproctitle sniffio starlette tiktoken
truststore uvicorn uvloop watchfiles websockets xgrammar yarl zipp"
ray="grpcio"

# Installs the named packages, in the versions of requirements/gpu.txt, into a folder.
fetch() {
    local into=$1 name pin
    shift
    for name in "$@"; do
        pin=$(grep -iE "^${name//[-_]/[-_]}==" requirements/gpu.txt | cut -d ' ' -f 1) || { echo "not pinned: $name" >&2; continue; }
        echo "$pin"
    done >"$work/pins"
    .venv/bin/uv pip install -q --python $python --target "$into" --no-deps --python-version 3.12 \
        --python-platform x86_64-manylinux_2_31 --no-build-isolation-package deepspeed -r "$work/pins"
    find "$into" \( -name tests -o -name test -o -name __pycache__ -o -name '*.pyi' \) -prune -exec rm -rf {} +
    find "$into" -name '*.so*' -type f -exec strip --strip-unneeded {} + 2>/dev/null || true
}

# Packs a folder as a bundle, and checks its size.
pack() {
    local name=$1 from=$2
    mkdir -p "$out/$name"
    tar -C "$from" -c . | xz -T0 >"$out/$name/files.tar.xz"
    printf 'mkdir -p "$1" && tar -C "$1" -xJf "$(dirname "$0")/files.tar.xz"\n' >"$out/$name/unpack.sh"
    local size
    size=$(du -sb "$out/$name" | cut -f 1)
    printf '%-10s %5.1f MiB\n' "$name" "$(echo "$size / 1048576" | bc -l)"
    if [ "$size" -gt $((64 << 20)) ]; then echo "$name is larger than 64 MiB" >&2; exit 1; fi
}

fetch "$work/training" $base
fetch "$work/vllm" vllm
rm -f "$work"/vllm/vllm/{vllm-rs,_moe_C*,_flashkda*,_flashmla*,_deepselect*,_qutlass*} "$work"/vllm/vllm/vllm_flash_attn/_vllm_fa2*
rm -rf "$work"/vllm/vllm/third_party/deep_gemm
mkdir -p "$work/engine/vllm"
mv "$work"/vllm/vllm/_C_stable_libtorch* "$work/engine/vllm"
fetch "$work/training" $vllm
cp -r "$work/vllm/." "$work/training"
fetch "$work/one_gpu" ray $ray
rm -rf "$work"/one_gpu/ray/{jars,rllib,data,serve,tune,train,air,dashboard/client,cpp,core/generated/*_grpc_java*}
rm -rf "$out"
for name in training engine one_gpu; do pack "$name" "$work/$name"; done
