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

{{/* Pods of a pool that evictions leave alone: what was said, else all it always has but one, and one of several: (dict "root" $ "pool" <its values>). */}}
{{- define "headrace.minAvailable" -}}
{{- $pods := include "headrace.pods" .pool | int -}}
{{- $always := ternary (.pool.minReplicas | int) $pods .root.Values.autoscaling.enabled -}}
{{- .pool.podDisruptionBudget.minAvailable | default (max (min 1 (sub $pods 1)) (sub $always 1) 0) -}}
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
{{- if .clientCaSecret -}}{{- $_ := set $public "client_ca_file" "/etc/headrace/tls/clients/ca.crt" -}}{{- end -}}
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
