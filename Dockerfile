# One image for both daemons: `docker run IMAGE master ...`, `docker run IMAGE storage ...`.
#   docker build -t kvstrata:0.1.0 .
#   docker build -t kvstrata:0.1.0-rdma --build-arg NIXL=1.5.1 .     with NIXL and the RDMA user-space libraries
ARG PYTHON=3.11

FROM python:${PYTHON}-slim-bookworm AS build
ARG EXTRAS=redis,encryption
ARG NIXL=
WORKDIR /src
COPY pyproject.toml README.md LICENSE ./
COPY proto proto
COPY transfer transfer
COPY storage storage
COPY master master
COPY client client
COPY engine_adapter engine_adapter
COPY cli cli
RUN python -m venv --without-pip /opt/kvstrata
RUN python -m pip --python /opt/kvstrata/bin/python install --no-cache-dir --only-binary=:all: ".[${EXTRAS}]"
# Without its dependencies: those are torch, which moving bytes does not need.
RUN if [ -n "${NIXL}" ]; then python -m pip --python /opt/kvstrata/bin/python install --no-cache-dir --no-deps "nixl-cu12==${NIXL}"; fi

FROM python:${PYTHON}-slim-bookworm
ARG NIXL=
RUN if [ -n "${NIXL}" ]; then apt-get update && apt-get install -y --no-install-recommends ibverbs-providers libibverbs1 libnuma1 librdmacm1 && rm -rf /var/lib/apt/lists/*; fi
RUN mkdir -p /var/lib/kvstrata && chown 65532:65532 /var/lib/kvstrata
COPY --from=build /opt/kvstrata /opt/kvstrata
ENV PATH=/opt/kvstrata/bin:$PATH PYTHONUNBUFFERED=1 PYTHONDONTWRITEBYTECODE=1
# What HEALTHCHECK asks; a storage node: http://127.0.0.1:7411/healthz. Kubernetes has probes of its own.
ENV HEALTH_URL=http://127.0.0.1:7402/healthz
WORKDIR /var/lib/kvstrata
USER 65532:65532
EXPOSE 7400 7401 7402 7410 7411
STOPSIGNAL SIGTERM
HEALTHCHECK --interval=10s --timeout=5s --start-period=120s --retries=3 CMD ["python", "-c", "import os, urllib.request; urllib.request.urlopen(os.environ['HEALTH_URL'], timeout=4)"]
ENTRYPOINT ["kvstrata"]
CMD ["--help"]
