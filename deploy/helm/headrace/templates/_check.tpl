{{/* What cannot be said in values.schema.json: values that do not go together. */}}
{{- define "headrace.check" -}}
{{- range $role, $pool := .Values.pools -}}
{{- if gt ($pool.minReplicas | int) ($pool.maxReplicas | int) -}}
{{- fail (printf "pools.%s.minReplicas: %d is more than maxReplicas, which is %d" $role ($pool.minReplicas | int) ($pool.maxReplicas | int)) -}}
{{- end -}}
{{- $pods := include "headrace.pods" $pool | int -}}
{{- if and $.Values.autoscaling.enabled (or (lt $pods ($pool.minReplicas | int)) (gt $pods ($pool.maxReplicas | int))) -}}
{{- fail (printf "pools.%s.replicas: %d programs do not fit between minReplicas %d and maxReplicas %d" $role ($pool.replicas | int) ($pool.minReplicas | int) ($pool.maxReplicas | int)) -}}
{{- end -}}
{{- end -}}
{{- range $key := list "name" "model" "served_name" "host" "secret_file" "tenants_file" "tenants_redis_url" "tls" "ray" "store" "transport" -}}
{{- if hasKey $.Values.config $key -}}
{{- fail (printf "config.%s: the chart sets it from its own values; see values.yaml" $key) -}}
{{- end -}}
{{- end -}}
{{- if .Values.config.tenants -}}
{{- fail "config.tenants: say tenants.existingSecret; the chart asks for keys where it is set, and digests of keys belong in a Secret" -}}
{{- end -}}
{{- if and (hasKey .Values.config "timing") (hasKey (.Values.config.timing | default dict) "drain_s") -}}
{{- fail "config.timing.drain_s: say drainSeconds, from which the pods' grace period follows" -}}
{{- end -}}
{{- range $role := list "prefill" "decode" -}}
{{- if hasKey (dig "pools" $role (dict) $.Values.config) "replicas" -}}
{{- fail (printf "config.pools.%s.replicas: say pools.%s.replicas" $role $role) -}}
{{- end -}}
{{- end -}}
{{- range $key := list "replicas" "host" "http_port" "grpc_port" "admin_host" "admin_port" "share_ports" -}}
{{- if hasKey (dig "router" (dict) $.Values.config) $key -}}
{{- fail (printf "config.router.%s: the chart sets it: pools.router.replicas, routerHost, router.sharePorts, ports" $key) -}}
{{- end -}}
{{- end -}}
{{- if and (gt (.Values.pools.router.programsPerPod | int) 1) (not .Values.router.sharePorts) -}}
{{- fail "pools.router.programsPerPod: more than one router in a pod needs router.sharePorts" -}}
{{- end -}}
{{- if and .Values.serviceMonitor.enabled .Values.router.sharePorts -}}
{{- fail "serviceMonitor.enabled: not possible with router.sharePorts, where numbers have no port that is known" -}}
{{- end -}}
{{- if and .Values.gcsFaultTolerance.enabled (eq .Values.redis.mode "none") -}}
{{- fail "gcsFaultTolerance.enabled: needs redis.mode bundled or external" -}}
{{- end -}}
{{- if and (eq .Values.model.source "pvc") (not .Values.model.pvc.claimName) -}}
{{- fail "model.pvc.claimName: needed with model.source pvc" -}}
{{- end -}}
{{- if eq .Values.redis.mode "external" -}}
{{- if not .Values.redis.external.address -}}{{- fail "redis.external.address: needed with redis.mode external" -}}{{- end -}}
{{- if contains "@" .Values.redis.external.address -}}
{{- fail "redis.external.address: without user and password, which come from existingSecret" -}}
{{- end -}}
{{- if not .Values.redis.external.existingSecret -}}{{- fail "redis.external.existingSecret: needed with redis.mode external" -}}{{- end -}}
{{- end -}}
{{- if and .Values.serviceMonitor.enabled .Values.networkPolicy.enabled (not .Values.networkPolicy.monitoring) -}}
{{- fail "networkPolicy.monitoring: say where Prometheus is, or it cannot reach the routers' numbers" -}}
{{- end -}}
{{- if and .Values.serviceMonitor.enabled (or .Values.tenants.existingSecret .Values.tenants.redis.existingSecret) (not .Values.serviceMonitor.keySecret.name) -}}
{{- fail "serviceMonitor.keySecret: with tenants, Prometheus needs an operator's API key" -}}
{{- end -}}
{{- if and .Values.ingress.enabled (not .Values.ingress.host) -}}{{- fail "ingress.host: needed with ingress.enabled" -}}{{- end -}}
{{- if and .Values.ingress.grpc.enabled (not .Values.ingress.grpc.host) -}}{{- fail "ingress.grpc.host: needed with ingress.grpc.enabled" -}}{{- end -}}
{{- if and .Values.gateway.enabled (not .Values.gateway.parentRefs) -}}{{- fail "gateway.parentRefs: needed with gateway.enabled" -}}{{- end -}}
{{- if and .Values.networkPolicy.enabled .Values.networkPolicy.egress.enabled .Values.autoscaling.enabled (not .Values.networkPolicy.egress.apiServer.cidr) -}}
{{- fail "networkPolicy.egress.apiServer.cidr: the autoscaler could not reach the Kubernetes API without it" -}}
{{- end -}}
{{- include "headrace.checkPorts" . -}}
{{- include "headrace.checkNames" . -}}
{{- include "headrace.checkPods" . -}}
{{- include "headrace.checkReach" . -}}
{{- end -}}

{{/* All of these, and Ray's own, are one pod's: each is somebody else's, or Ray does not start. */}}
{{- define "headrace.checkPorts" -}}
{{- $v := .Values -}}
{{- $ranges := list (list "transport.portRange" $v.transport.portRange) (list "ports.internal" $v.ports.internal) (list "ports.rayWorkers" $v.ports.rayWorkers) -}}
{{- range $range := $ranges -}}
{{- if gt (index $range 1 0 | int) (index $range 1 1 | int) -}}
{{- fail (printf "%s: the first port is above the last" (index $range 0)) -}}
{{- end -}}
{{- end -}}
{{- if lt (sub (index $v.ports.internal 1) (index $v.ports.internal 0)) 999 -}}
{{- fail "ports.internal: 1000 ports at least, since every connection that a pod opens takes one as well" -}}
{{- end -}}
{{- if lt (sub (index $v.ports.rayWorkers 1) (index $v.ports.rayWorkers 0)) 99 -}}
{{- fail "ports.rayWorkers: 100 ports at least" -}}
{{- end -}}
{{- range $key := list "http" "grpc" "admin" "gcs" "nodeManager" "objectManager" -}}
{{- $ranges = append $ranges (list (printf "ports.%s" $key) (list (index $v.ports $key) (index $v.ports $key))) -}}
{{- end -}}
{{- range $port := list 8265 10001 52365 -}}
{{- $ranges = append $ranges (list (printf "Ray's own port %d" $port) (list $port $port)) -}}
{{- end -}}
{{- range $at, $one := $ranges -}}
{{- range $other := slice $ranges (add1 $at) -}}
{{- if and (le (index $one 1 0 | int) (index $other 1 1 | int)) (le (index $other 1 0 | int) (index $one 1 1 | int)) -}}
{{- fail (printf "%s: has ports in common with %s" (index $one 0) (index $other 0)) -}}
{{- end -}}
{{- end -}}
{{- end -}}
{{- end -}}

{{- define "headrace.checkNames" -}}
{{- $v := .Values -}}
{{- $name := include "headrace.fullname" . -}}
{{- if not (regexMatch "^[a-z]([a-z0-9-]*[a-z0-9])?$" $name) -}}
{{- fail (printf "fullnameOverride: needed, since services cannot have names that begin with %q" $name) -}}
{{- end -}}
{{- if and (not $v.serviceAccount.create) (not $v.serviceAccount.name) -}}
{{- fail "serviceAccount.name: needed with serviceAccount.create false" -}}
{{- end -}}
{{- with $v.model.initContainer -}}
{{- if not .image -}}{{- fail "model.initContainer.image: needed" -}}{{- end -}}
{{- if not (include "headrace.modelMounted" $) -}}{{- fail "model.initContainer: there is no volume to fill with model.source none or the tracer" -}}{{- end -}}
{{- end -}}
{{- range $role, $pool := $v.pools -}}
{{- $most := ternary ($pool.maxReplicas | int) (include "headrace.pods" $pool | int) $v.autoscaling.enabled -}}
{{- if and $pool.podDisruptionBudget.enabled $pool.podDisruptionBudget.minAvailable (ge ($pool.podDisruptionBudget.minAvailable | int) $most) -}}
{{- fail (printf "pools.%s.podDisruptionBudget.minAvailable: %d of at most %d pods: none could ever be evicted" $role ($pool.podDisruptionBudget.minAvailable | int) $most) -}}
{{- end -}}
{{- end -}}
{{- end -}}

{{/* Who could not reach whom, or would take what is meant for another. */}}
{{- define "headrace.checkReach" -}}
{{- $v := .Values -}}
{{- if and $v.ingress.enabled $v.ingress.grpc.enabled (eq $v.ingress.host $v.ingress.grpc.host) -}}
{{- fail "ingress.grpc.host: must not be ingress.host, since controllers switch a whole host to gRPC" -}}
{{- end -}}
{{- if $v.gateway.enabled -}}
{{- $both := false -}}
{{- range $v.gateway.httpHostnames -}}{{- if has . $v.gateway.grpcHostnames -}}{{- $both = true -}}{{- end -}}{{- end -}}
{{- if or $both (not $v.gateway.httpHostnames) (not $v.gateway.grpcHostnames) -}}
{{- fail "gateway.httpHostnames, gateway.grpcHostnames: both needed and apart; a Gateway refuses one of two routes with the same host" -}}
{{- end -}}
{{- end -}}
{{- if and $v.serviceMonitor.enabled $v.tls.public.existingSecret (not $v.tls.public.serverName) -}}
{{- fail "tls.public.serverName: needed with serviceMonitor.enabled, since Prometheus asks pods by their addresses" -}}
{{- end -}}
{{- if and $v.serviceMonitor.rules (not $v.serviceMonitor.enabled) -}}
{{- fail "serviceMonitor.rules: needs serviceMonitor.enabled" -}}
{{- end -}}
{{- range $key := list "ownCa" "serverName" "clientCaSecret" -}}
{{- if and (index $v.tls.public $key) (not $v.tls.public.existingSecret) -}}
{{- fail (printf "tls.public.%s: there is no TLS without tls.public.existingSecret" $key) -}}
{{- end -}}
{{- end -}}
{{- if eq ($v.service.httpPort | int) ($v.service.grpcPort | int) -}}
{{- fail "service.grpcPort: must not be service.httpPort" -}}
{{- end -}}
{{- if and $v.tls.public.clientCaSecret $v.router.sharePorts -}}
{{- fail "tls.public.clientCaSecret: not possible with router.sharePorts, where probes ask at the clients' port and have no certificate" -}}
{{- end -}}
{{- if and $v.networkPolicy.enabled $v.networkPolicy.egress.enabled (not $v.networkPolicy.egress.extra) -}}
{{- if eq $v.redis.mode "external" -}}{{- fail "networkPolicy.egress.extra: say there how to reach redis.external" -}}{{- end -}}
{{- if $v.tenants.redis.existingSecret -}}{{- fail "networkPolicy.egress.extra: say there how to reach tenants.redis" -}}{{- end -}}
{{- if and (include "headrace.modelMounted" .) (eq $v.model.source "cache") (not (hasPrefix "/" $v.model.name)) (not $v.model.initContainer) -}}
{{- fail (printf "networkPolicy.egress.extra: say there how to fetch %s, or bring it with model.source pvc or model.initContainer" $v.model.name) -}}
{{- end -}}
{{- end -}}
{{- end -}}
