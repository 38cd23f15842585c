# m2flow for machines without a GPU, at the versions of requirements.lock. From the repository's root:
#
#     docker build -f docker/cpu.Dockerfile -t m2flow-cpu .
#     docker run --rm --init --shm-size=2g m2flow-cpu
#
# With pip's default index the build takes PyTorch for CUDA, which works and has several gigabytes more. The smaller one comes from an
# index of CPU builds, whose address is on PyTorch's installation page: --build-arg PIP_EXTRA_INDEX_URL=...

FROM python:3.11-slim
ARG PIP_EXTRA_INDEX_URL
WORKDIR /src
COPY requirements.lock pyproject.toml setup.py MANIFEST.in README.md LICENSE ./
COPY m2flow m2flow
COPY flows flows
RUN --mount=type=cache,target=/var/cache/pip pip install --cache-dir /var/cache/pip --constraint requirements.lock .

RUN useradd --create-home --home-dir /m2flow m2flow
USER m2flow
WORKDIR /m2flow
# A volume that is mounted here belongs to this user.
RUN mkdir runs
ENTRYPOINT ["m2flow"]
CMD ["demo"]
