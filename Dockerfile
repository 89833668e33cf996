# An image with dsl alone: `docker build --tag dsl .`, then `docker run dsl --help`. To add dsl to your own image, copy the wheel.
FROM rust:1.95-slim-bookworm AS build
# Debian removes earlier versions from its mirrors, so this line names none.
# hadolint ignore=DL3008
RUN apt-get update && apt-get install --yes --no-install-recommends python3-pip && rm -rf /var/lib/apt/lists/*
COPY Cargo.toml Cargo.lock LICENSE README.md pyproject.toml /dsl/
COPY rust /dsl/rust
COPY python /dsl/python
RUN pip wheel --no-deps --wheel-dir /wheels /dsl
FROM python:3.13-slim-bookworm
RUN --mount=type=bind,from=build,source=/wheels,target=/wheels pip install --no-cache-dir /wheels/*.whl && useradd --create-home dsl
USER 1000
WORKDIR /home/dsl
ENTRYPOINT ["dsl"]
