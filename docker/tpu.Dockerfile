# For TPUs: docker build -f docker/tpu.Dockerfile -t ejdist:tpu .
FROM python:3.12-slim-bookworm
WORKDIR /opt/ejdist
COPY pyproject.toml README.md LICENSE ./
COPY kernels kernels
COPY ejdist ejdist
COPY recipes recipes
COPY launch launch
# The extras bound every version.
# hadolint ignore=DL3013
RUN pip install --no-cache-dir '.[train,tpu,gcs]'
# Runs write to outputs/ here: mount a volume, or give run.dir.
WORKDIR /work
CMD ["python", "-m", "launch"]
