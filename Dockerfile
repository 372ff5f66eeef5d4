# dpformer for training and serving: docker build -t dpformer . ; docs/guide/deploy.md
FROM python:3.12-slim AS build
ARG TORCH_INDEX=""
RUN apt-get update && apt-get install --yes --no-install-recommends gcc libc6-dev && rm -rf /var/lib/apt/lists/*
RUN python -m venv /opt/dpformer
ENV PATH=/opt/dpformer/bin:$PATH PIP_NO_CACHE_DIR=1 PIP_DISABLE_PIP_VERSION_CHECK=1
WORKDIR /source
COPY constraints.txt ./
RUN pip install ${TORCH_INDEX:+--index-url "$TORCH_INDEX"} -c constraints.txt torch
COPY pyproject.toml setup.py README.md LICENSE ./
COPY src ./src
RUN pip install -c constraints.txt ".[serve,export,report]"

FROM python:3.12-slim
RUN useradd --create-home --uid 10001 dpformer
COPY --from=build /opt/dpformer /opt/dpformer
ENV PATH=/opt/dpformer/bin:$PATH PYTHONUNBUFFERED=1 OMP_WAIT_POLICY=PASSIVE
USER dpformer
WORKDIR /work
EXPOSE 8000
STOPSIGNAL SIGTERM
HEALTHCHECK --interval=10s --timeout=5s --start-period=60s \
  CMD ["python", "-c", "from urllib.request import urlopen; urlopen('http://127.0.0.1:8000/ready', timeout=4)"]
ENTRYPOINT ["dpformer"]
CMD ["serve", "/runs/current", "--host", "0.0.0.0", "--watch", "--access-log", "-"]
