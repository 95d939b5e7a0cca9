# The GPU machine; what a study finds stays in fusewise-runs of the folder one is in:
#     docker build -t fusewise .
#     docker run --gpus all -it --rm -v "$PWD/fusewise-runs:/fusewise/fusewise-runs" fusewise make study
FROM nvidia/cuda:13.0.2-devel-ubuntu24.04
RUN apt-get update && apt-get install -y --no-install-recommends g++ make python3 python3-dev python3-venv \
    && rm -rf /var/lib/apt/lists/*
WORKDIR /fusewise
COPY . .
RUN make .venv/ready
CMD ["make", "study"]
