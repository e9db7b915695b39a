{{/* Names, labels and what several objects share. */}}

{{- define "headrace.fullname" -}}
{{- if .Values.fullnameOverride -}}
{{- .Values.fullnameOverride | trunc 40 | trimSuffix "-" -}}
{{- else -}}
{{- $name := default .Chart.Name .Values.nameOverride -}}
{{- if contains $name .Release.Name -}}
{{- .Release.Name | trunc 40 | trimSuffix "-" -}}
{{- else -}}
{{- printf "%s-%s" .Release.Name $name | trunc 40 | trimSuffix "-" -}}
{{- end -}}
{{- end -}}
{{- end -}}

{{- define "headrace.labels" -}}
helm.sh/chart: {{ printf "%s-%s" .Chart.Name .Chart.Version }}
{{ include "headrace.selector" . }}
app.kubernetes.io/version: {{ .Chart.AppVersion | quote }}
app.kubernetes.io/managed-by: {{ .Release.Service }}
{{- end -}}

{{/* What all pods of this release carry; labels of KubeRay's own tell the groups apart. */}}
{{- define "headrace.selector" -}}
app.kubernetes.io/name: headrace
app.kubernetes.io/instance: {{ .Release.Name }}
{{- end -}}

{{/* Pods of one group: (dict "root" $ "group" "decode"); KubeRay calls the head's group "headgroup". */}}
{{- define "headrace.group" -}}
ray.io/cluster: {{ include "headrace.fullname" .root }}
ray.io/group: {{ .group }}
{{- end -}}

{{- define "headrace.image" -}}
{{- with .Values.image -}}
{{- if .digest -}}{{ .repository }}@{{ .digest }}{{- else -}}{{ .repository }}:{{ .tag | default $.Chart.AppVersion }}{{- end -}}
{{- end -}}
{{- end -}}

{{- define "headrace.authSecret" -}}
{{- .Values.auth.existingSecret | default (printf "%s-auth" (include "headrace.fullname" .)) -}}
{{- end -}}

{{- define "headrace.redisSecret" -}}
{{- if eq .Values.redis.mode "external" -}}{{ .Values.redis.external.existingSecret }}
{{- else -}}{{ .Values.redis.bundled.existingSecret | default (printf "%s-redis" (include "headrace.fullname" .)) }}{{- end -}}
{{- end -}}

{{- define "headrace.redisAddress" -}}
{{- if eq .Values.redis.mode "external" -}}{{ .Values.redis.external.address }}
{{- else -}}redis://{{ include "headrace.fullname" . }}-redis.{{ .Release.Namespace }}.svc:6379{{- end -}}
{{- end -}}

{{- define "headrace.workerServiceAccount" -}}
{{- .Values.serviceAccount.name | default (include "headrace.fullname" .) -}}
{{- end -}}

{{/* The autoscaler runs beside the head and is the only one who talks to Kubernetes. */}}
{{- define "headrace.headServiceAccount" -}}
{{- printf "%s-head" (include "headrace.fullname" .) -}}
{{- end -}}

{{- define "headrace.runDir" -}}
/home/headrace/.headrace/{{ include "headrace.fullname" . }}
{{- end -}}

{{/*
The pods' grace period: TimingSettings.pod_stop_s of cluster/core/config.py, which a test compares. It holds drain_s, the
supervisor's 10 s, and 20 s for the preStop command to start and for endpoints to go.
*/}}
{{- define "headrace.graceSeconds" -}}
{{- add (ceil .Values.drainSeconds | int) 30 -}}
{{- end -}}

{{- define "headrace.modelMounted" -}}
{{- if and (ne .Values.model.source "none") (ne .Values.model.name "tracer") -}}yes{{- end -}}
{{- end -}}

{{/* Pods that hold a pool's first programs: (its values). */}}
{{- define "headrace.pods" -}}
{{- div (add .replicas .programsPerPod -1) .programsPerPod -}}
{{- end -}}

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
{{- range $key, $range := dict "transport.portRange" .Values.transport.portRange "ports.internal" .Values.ports.internal "ports.rayWorkers" .Values.ports.rayWorkers -}}
{{- if gt (index $range 0 | int) (index $range 1 | int) -}}
{{- fail (printf "%s: the first port is above the last" $key) -}}
{{- end -}}
{{- end -}}
{{- end -}}

{{/* cluster.yaml: one file for all pods. What differs between them (their address) comes with --set. */}}
{{- define "headrace.config" -}}
{{- $own := dict
  "name" (include "headrace.fullname" .)
  "model" .Values.model.name
  "secret_file" "/etc/headrace/secret/cluster-secret"
  "timing" (dict "drain_s" .Values.drainSeconds)
  "pools" (dict "prefill" (dict "replicas" .Values.pools.prefill.replicas) "decode" (dict "replicas" .Values.pools.decode.replicas))
  "router" (dict "replicas" .Values.pools.router.replicas "host" .Values.routerHost "http_port" .Values.ports.http "grpc_port" .Values.ports.grpc "admin_port" (ternary 0 (.Values.ports.admin | int) .Values.router.sharePorts) "share_ports" .Values.router.sharePorts)
  "transport" (dict "kind" "nixl" "require" .Values.transport.require "devices" .Values.transport.devices "port_range" .Values.transport.portRange)
  "ray" (dict "address" (printf "%s-head-svc.%s.svc:%d" (include "headrace.fullname" .) .Release.Namespace (.Values.ports.gcs | int)))
-}}
{{- with .Values.model.servedName -}}{{- $_ := set $own "served_name" . -}}{{- end -}}
{{- if .Values.tenants.existingSecret -}}{{- $_ := set $own "tenants_file" "/etc/headrace/tenants/tenants.yaml" -}}{{- end -}}
{{- $tls := dict -}}
{{- with .Values.tls.public -}}
{{- if .existingSecret -}}
{{- $public := dict "cert_file" "/etc/headrace/tls/public/tls.crt" "key_file" "/etc/headrace/tls/public/tls.key" -}}
{{- if .ownCa -}}{{- $_ := set $public "ca_file" "/etc/headrace/tls/public/ca.crt" -}}{{- end -}}
{{- if .serverName -}}{{- $_ := set $public "server_name" .serverName -}}{{- end -}}
{{- $_ := set $tls "public" $public -}}
{{- end -}}
{{- end -}}
{{- with .Values.tls.internal -}}
{{- if .existingSecret -}}
{{- $_ := set $tls "internal" (dict "cert_file" "/etc/headrace/tls/internal/tls.crt" "key_file" "/etc/headrace/tls/internal/tls.key" "ca_file" "/etc/headrace/tls/internal/ca.crt" "server_name" .serverName) -}}
{{- end -}}
{{- end -}}
{{- if $tls -}}{{- $_ := set $own "tls" $tls -}}{{- end -}}
{{- toYaml (mergeOverwrite (deepCopy .Values.config) $own) -}}
{{- end -}}
