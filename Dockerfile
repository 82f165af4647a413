# A CPU image; for CUDA, `--build-arg ACCELERATOR=cu130` and NVIDIA's container runtime. It holds no model: the embedded
# one is fetched on first start into /var/cache/dormouse, which a volume keeps (docker-compose.yml). Built and run by hand
# where there is an engine: docs/unverified.md has the commands.
ARG PYTHON=3.12

FROM python:${PYTHON}-slim AS build
# Which of PyTorch's own indexes: `cpu` is about 0.2 GB, those with CUDA (`cu126`, `cu130`) about 3 GB.
ARG ACCELERATOR=cpu
ARG TORCH_INDEX=https://download.pytorch.org/whl/${ACCELERATOR}
RUN python -m venv /opt/dormouse
ENV PATH=/opt/dormouse/bin:$PATH
WORKDIR /src
COPY constraints.txt ./
RUN pip install --no-cache-dir --extra-index-url "${TORCH_INDEX}" -c constraints.txt torch
COPY . .
RUN pip install --no-cache-dir --extra-index-url "${TORCH_INDEX}" -c constraints.txt '.[otel]'

FROM python:${PYTHON}-slim
# torch's CPU kernels need OpenMP's runtime, and our own a C compiler, in whatever version the base image's release has.
# hadolint ignore=DL3008
RUN apt-get update \
    && apt-get install -y --no-install-recommends gcc libc6-dev libgomp1 \
    && rm -rf /var/lib/apt/lists/* \
    && useradd --system --uid 10001 --no-create-home dormouse \
    && install -d -m 0700 -o dormouse -g dormouse /var/cache/dormouse /var/lib/dormouse
COPY --from=build /opt/dormouse /opt/dormouse
ENV PATH=/opt/dormouse/bin:$PATH \
    HOME=/var/cache/dormouse \
    NVIDIA_VISIBLE_DEVICES=all \
    NVIDIA_DRIVER_CAPABILITIES=compute,utility \
    PYTHONUNBUFFERED=1 \
    HF_HOME=/var/cache/dormouse/huggingface \
    DORMOUSE_CACHE_DIR=/var/cache/dormouse \
    DORMOUSE_NVME_DIR=/var/lib/dormouse/nvme \
    DORMOUSE_LOG_FORMAT=json
USER 10001
WORKDIR /var/lib/dormouse
VOLUME ["/var/cache/dormouse", "/var/lib/dormouse"]
EXPOSE 8000
# The first start fetches and converts a model; a large one takes minutes to load.
HEALTHCHECK --interval=10s --timeout=5s --start-period=300s --retries=3 \
    CMD ["python", "-c", "import urllib.request; urllib.request.urlopen('http://127.0.0.1:8000/readyz', timeout=4)"]
# Inside a container every address is the container's own: who may connect is decided by how the port is published. The
# server cannot know that, so without keys it starts only where somebody says --allow-no-auth (docker-compose.yml does).
ENTRYPOINT ["dormouse"]
CMD ["serve", "--host", "0.0.0.0", "--port", "8000"]
