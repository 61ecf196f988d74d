# drot with its CUDA kernels.
#
#   docker build --tag drot .
#   docker run --gpus all --user "$(id -u):$(id -g)" --volume "$PWD:/models" \
#     --volume "$HOME/.cache/huggingface:/cache/huggingface" --env HF_TOKEN \
#     drot prune MODEL --out /models/pruned --format packed
#   docker run --gpus all --publish 127.0.0.1:8000:8000 --volume "$PWD:/models" \
#     drot serve /models/pruned --host 0.0.0.0
#
# CUDA must be the CUDA that the wheels of TORCH are built for: 13.0 for torch 2.11 to 2.14. No GPU is needed to
# build the image. MAX_JOBS limits the parallel compiles, which take about 2 GiB each.
ARG CUDA=13.0.2
ARG UBUNTU=24.04

FROM nvidia/cuda:${CUDA}-devel-ubuntu${UBUNTU} AS build
ARG TORCH=2.14.*
ARG MAX_JOBS=
ENV PIP_NO_CACHE_DIR=1
RUN apt-get update \
 && apt-get install --yes --no-install-recommends python3-dev python3-venv \
 && python3 -m venv /opt/drot
ENV PATH=/opt/drot/bin:$PATH
RUN pip install "torch==${TORCH}" 'setuptools>=77' wheel cmake ninja
COPY . /src
RUN DROT_WITH_CUDA=1 pip install --no-build-isolation '/src[eval,finetune,gguf,report,serve]' \
 && pip uninstall --yes cmake ninja wheel

# The wheels of torch bring the CUDA libraries, so the second image needs no toolkit. torch.compile
# needs a C compiler, and on a CPU a C++ compiler.
FROM ubuntu:${UBUNTU}
RUN apt-get update \
 && apt-get install --yes --no-install-recommends python3-dev g++ libc6-dev \
 && rm -rf /var/lib/apt/lists/*
COPY --from=build /opt/drot /opt/drot
ENV PATH=/opt/drot/bin:$PATH \
    NVIDIA_VISIBLE_DEVICES=all \
    NVIDIA_DRIVER_CAPABILITIES=compute,utility
# Any user may run the image, root too: the caches lie where each of them can write. USER is what torch.compile
# names its cache by, as a number such as 1234 has no name here.
ENV HOME=/cache HF_HOME=/cache/huggingface DROT_CACHE=/cache/drot USER=drot
RUN mkdir --parents /cache/huggingface /cache/drot /models && chmod --recursive 1777 /cache /models
USER 1000:1000
WORKDIR /models
ENTRYPOINT ["drot"]
CMD ["info"]
