{{/* Values of pods that no pod could run with, or not as it was meant. */}}

{{/* What a quantity of Kubernetes comes to, as a number in a string. */}}
{{- define "headrace.amount" -}}
{{- $units := dict "" 1.0 "m" 0.001 "k" 1e3 "M" 1e6 "G" 1e9 "T" 1e12 "P" 1e15 "Ki" 1024.0 "Mi" 1048576.0 "Gi" 1073741824.0 "Ti" 1099511627776.0 "Pi" 1125899906842624.0 -}}
{{- $text := toString . -}}
{{- if kindIs "string" . -}}
{{- printf "%.3f" (mulf (regexFind "^[0-9.]+" $text | float64) (index $units (regexFind "[A-Za-z]*$" $text))) -}}
{{- else -}}
{{- printf "%.3f" (float64 .) -}}
{{- end -}}
{{- end -}}

{{/* (dict "at" "head.resources" "resources" <requests and limits>) */}}
{{- define "headrace.checkResources" -}}
{{- $limits := .resources.limits | default dict -}}
{{- range $what, $asked := .resources.requests -}}
{{- if hasKey $limits $what -}}
{{- $most := index $limits $what -}}
{{- if gt (include "headrace.amount" $asked | float64) (include "headrace.amount" $most | float64) -}}
{{- fail (printf "%s.requests.%s: %v is more than the limit, which is %v" $.at $what $asked $most) -}}
{{- end -}}
{{- end -}}
{{- end -}}
{{- end -}}

{{/* (dict "root" $ "at" "pools.decode.labels" "labels" <labels>) */}}
{{- define "headrace.checkLabels" -}}
{{- $own := include "headrace.labels" .root | fromYaml -}}
{{- range $key, $_ := .labels -}}
{{- if or (hasKey $own $key) (eq $key "app.kubernetes.io/component") (hasPrefix "ray.io/" $key) -}}
{{- fail (printf "%s: %s is the chart's or KubeRay's own" $.at $key) -}}
{{- end -}}
{{- end -}}
{{- end -}}

{{/* (dict "root" $ "group" "decode" "at" "pools.decode" "spec" <the group's values>) */}}
{{- define "headrace.checkPod" -}}
{{- include "headrace.checkResources" (dict "at" (printf "%s.resources" .at) "resources" .spec.resources) -}}
{{- include "headrace.checkLabels" (dict "root" .root "at" (printf "%s.labels" .at) "labels" .spec.labels) -}}
{{- $memory := dig "limits" "memory" "" .spec.resources -}}
{{- if and $memory (ge (include "headrace.amount" .spec.shm | float64) (include "headrace.amount" $memory | float64)) -}}
{{- fail (printf "%s.shm: %s is no less than resources.limits.memory, %v, of which it takes its part" .at .spec.shm $memory) -}}
{{- end -}}
{{- with .spec.hugepages -}}
{{- $pages := divf (include "headrace.amount" . | float64) 2097152.0 -}}
{{- if or (ne $pages (floor $pages)) (eq $pages 0.0) -}}
{{- fail (printf "%s.hugepages: %s are no whole pages of 2Mi" $.at .) -}}
{{- end -}}
{{- end -}}
{{- $alone := set (deepCopy .spec) "env" list -}}
{{- $taken := list "RAY_ADDRESS" "RAY_AUTH_MODE" "RAY_AUTH_TOKEN" -}}
{{- range include "headrace.env" (dict "root" .root "group" .group "spec" $alone) | fromYamlArray -}}
{{- $taken = append $taken .name -}}
{{- end -}}
{{- range .spec.env -}}
{{- if has .name $taken -}}
{{- fail (printf "%s.env: %s is the chart's or KubeRay's own" $.at .name) -}}
{{- end -}}
{{- end -}}
{{- end -}}

{{- define "headrace.checkPods" -}}
{{- $v := .Values -}}
{{- include "headrace.checkPod" (dict "root" . "group" "head" "at" "head" "spec" $v.head) -}}
{{- range $role, $pool := $v.pools -}}
{{- include "headrace.checkPod" (dict "root" $ "group" $role "at" (printf "pools.%s" $role) "spec" $pool) -}}
{{- end -}}
{{- include "headrace.checkResources" (dict "at" "autoscaling.resources" "resources" $v.autoscaling.resources) -}}
{{- include "headrace.checkResources" (dict "at" "redis.bundled.resources" "resources" $v.redis.bundled.resources) -}}
{{- include "headrace.checkLabels" (dict "root" . "at" "serviceMonitor.labels" "labels" $v.serviceMonitor.labels) -}}
{{- include "headrace.checkTransport" . -}}
{{- end -}}

{{- define "headrace.checkTransport" -}}
{{- $t := .Values.transport -}}
{{- if eq $t.require "shm" -}}
{{- fail "transport.require: shm cannot be met, since two pods never share memory; any, cuda_ipc or rdma" -}}
{{- end -}}
{{- if and (eq $t.require "rdma") (not $t.rdma.resource) -}}
{{- fail "transport.rdma.resource: needed with transport.require rdma, or no pod has a device for it" -}}
{{- end -}}
{{- range $role := list "prefill" "decode" -}}
{{- $programs := (index $.Values.pools $role).programsPerPod | int -}}
{{- $needed := mul 2 $programs (len $t.devices) -}}
{{- $there := add1 (sub (index $t.portRange 1 | int) (index $t.portRange 0 | int)) -}}
{{- if lt $there $needed -}}
{{- fail (printf "transport.portRange: %d ports are too few for pools.%s.programsPerPod %d, which take %d, as programs also start anew" $there $role $programs $needed) -}}
{{- end -}}
{{- end -}}
{{- end -}}
