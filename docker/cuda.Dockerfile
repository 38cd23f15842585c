# m2flow and SGLang for NVIDIA GPUs. From the repository's root:
#
#     docker build -f docker/cuda.Dockerfile -t m2flow-cuda .
#     docker run --rm --init --gpus all --ipc=host -v "$PWD":/flows:ro m2flow-cuda run /flows/grpo.py --cluster /etc/m2flow/sglang.yaml
#
# Two environments, for SGLang's dependencies contradict m2flow's: m2flow talks to the server in /opt/sglang over HTTP. m2flow's packages
# have the versions of the locks, SGLang has that of requirements-sglang-cpu.lock and brings its own. The image has CUDA's compiler because
# SGLang and DeepSpeed compile kernels when they start.

FROM nvidia/cuda:13.0.1-devel-ubuntu24.04
RUN apt-get update \
    && apt-get install --yes --no-install-recommends python3-venv python3-dev build-essential ninja-build libnuma1 \
    && rm -rf /var/lib/apt/lists/*
RUN --mount=type=cache,target=/var/cache/pip python3 -m venv /opt/sglang && /opt/sglang/bin/pip install --cache-dir /var/cache/pip sglang==0.5.23

WORKDIR /src
COPY requirements.lock requirements-full.lock pyproject.toml setup.py MANIFEST.in README.md LICENSE ./
COPY m2flow m2flow
COPY flows flows
COPY docker/sglang.yaml /etc/m2flow/sglang.yaml
RUN --mount=type=cache,target=/var/cache/pip python3 -m venv /opt/m2flow && /opt/m2flow/bin/pip install --cache-dir /var/cache/pip \
    --constraint requirements.lock --constraint requirements-full.lock ".[deepspeed,lora,parquet,grammar,rewards]"
ENV PATH=/opt/m2flow/bin:$PATH

RUN useradd --create-home --home-dir /m2flow m2flow
USER m2flow
WORKDIR /m2flow
# A volume that is mounted here belongs to this user.
RUN mkdir runs
ENTRYPOINT ["m2flow"]
CMD ["doctor"]
