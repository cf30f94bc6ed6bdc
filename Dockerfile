# lmoffload with torch's CPU build.
#
#     docker build -t lmoffload .
#     docker run --rm -it -v "$PWD":/work -v lmoffload:/home/user lmoffload run MODEL -p "The sea is"
#
# The volume keeps the machine's profile and quantized weights; /work is where models, prompts and answers lie. --memory and --cpus are kept.
FROM python:3.11-slim AS build
WORKDIR /source
COPY . .
RUN pip install --no-cache-dir build && python -m build --wheel --outdir /dist .

FROM python:3.11-slim
COPY constraints.txt /tmp/
COPY --from=build /dist /tmp/dist
RUN pip install --no-cache-dir --extra-index-url https://download.pytorch.org/whl/cpu -c /tmp/constraints.txt "torch==2.13.0+cpu" \
    && pip install --no-cache-dir -c /tmp/constraints.txt "$(ls /tmp/dist/*.whl)[tables]" \
    && rm -r /tmp/dist /tmp/constraints.txt \
    && useradd --create-home user && mkdir -p /work && chown user /work
USER user
WORKDIR /work
ENTRYPOINT ["lmoffload"]
CMD ["--help"]
