# fedsynth in a container: no data inside, no root.
#
#     docker build -t fedsynth .                                      # CPU
#     docker build -t fedsynth:cuda --build-arg VARIANT=cuda .        # CUDA
#
# docs/docker.md says how it is run.
ARG PYTHON=3.12

FROM python:${PYTHON}-slim AS wheel
WORKDIR /source
RUN pip install --no-cache-dir "build>=1.2" "setuptools>=77"
COPY pyproject.toml README.md LICENSE ./
COPY fedsynth fedsynth
COPY privacy privacy
COPY cli cli
RUN python -m build --wheel --no-isolation --outdir /wheels

FROM python:${PYTHON}-slim
ARG VARIANT=cpu
ARG EXTRAS=plots,sign,flower
# PyTorch's own index has builds without CUDA, of a tenth of the size; the usual one has those with it.
ARG CPU_INDEX=https://download.pytorch.org/whl/cpu
COPY --from=wheel /wheels /wheels
# The wheel says which versions it works with; an image of today shall have the newest of them.
# hadolint ignore=DL3013
RUN case "$VARIANT" in \
        cpu) pip install --no-cache-dir --index-url "$CPU_INDEX" "torch>=2.6" "torchvision>=0.21" ;; \
        cuda) pip install --no-cache-dir "torch>=2.6" "torchvision>=0.21" ;; \
        *) echo "VARIANT is cpu or cuda, not $VARIANT" >&2; exit 1 ;; \
    esac \
    && wheel="$(ls /wheels/*.whl)" \
    && pip install --no-cache-dir "${wheel}[${EXTRAS}]" \
    && rm -rf /wheels \
    && useradd --create-home --uid 10001 fedsynth \
    && install -d -o fedsynth -g fedsynth /output

ENV PYTHONUNBUFFERED=1 FEDSYNTH_DATA=/data
USER 10001
WORKDIR /output
ENTRYPOINT ["fedsynth"]
CMD ["--help"]
