# For machines that are not x86-64 Linux: the GPU and TPU compilers have wheels for that platform only.
#
#   docker build --platform linux/amd64 -t remat-kit .
#   docker run --rm --platform linux/amd64 remat-kit compare models:gpt2_small --policy none --policy full --target h100
#
# With your own step in the current folder (module:function is looked up there first):
#
#   docker run --rm --platform linux/amd64 -v "$PWD":/mine -w /mine remat-kit compare my_step:train --policy full --target v5e
FROM --platform=linux/amd64 python:3.12-slim

WORKDIR /remat-kit
COPY pyproject.toml constraints.txt README.md LICENSE ./
COPY remat_kit ./remat_kit
RUN pip install --no-cache-dir --constraint constraints.txt '.[gpu,tpu,train]'
COPY models ./models

ENTRYPOINT ["remat-kit"]
CMD ["--help"]
