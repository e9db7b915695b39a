{{/* Pieces of the pod templates: (dict "root" $ "group" "head|prefill|decode|router" "spec" <the group's values>). */}}

{{/*
Ray's and our own command. `headrace node` starts Ray with exactly what Headrace needs; after `--` come its ports. The head's
own monitor would tell the GCS of autoscaling as well as KubeRay's autoscaler beside it: KubeRay's command, which ours
replaces, leaves it out too. Redis' user and password are not here, where everybody on the node would see them: our command
takes them from the variables that KubeRay makes of gcsFaultToleranceOptions.
*/}}
{{- define "headrace.command" -}}
{{- $v := .root.Values -}}
- headrace
- node
- {{ .group }}
{{- if ne .group "head" }}
- --places={{ .spec.programsPerPod }}
{{- end }}
- -f
- /etc/headrace/cluster.yaml
- --set
- host=$(POD_IP)
{{- if eq .group "router" }}
- --set
{{- if or $v.tenants.existingSecret $v.tenants.redis.existingSecret }}
- {{ printf "router.admin_host='%s'" $v.routerHost | quote }}
{{- else }}
- router.admin_host=$(POD_IP)
{{- end }}
{{- end }}
- --
- --node-manager-port={{ $v.ports.nodeManager }}
- --object-manager-port={{ $v.ports.objectManager }}
- --min-worker-port={{ index $v.ports.rayWorkers 0 }}
- --max-worker-port={{ index $v.ports.rayWorkers 1 }}
{{- if eq .group "head" }}
- --no-monitor
{{- end }}
{{- end -}}

{{- define "headrace.env" -}}
{{- $v := .root.Values -}}
- name: POD_IP
  valueFrom:
    fieldRef:
      fieldPath: status.podIP
- name: HOME
  value: /home/headrace
- name: XDG_CACHE_HOME
  value: {{ $v.model.mountPath }}
- name: HF_HOME
  value: {{ $v.model.mountPath }}/hub
{{- with $v.model.hubTokenSecret }}
{{- if .name }}
- name: HF_TOKEN
  valueFrom:
    secretKeyRef:
      name: {{ .name }}
      key: {{ .key | default "token" }}
{{- end }}
{{- end }}
{{- if and (eq .group "head") (ne $v.redis.mode "none") }}
- name: HEADRACE_REDIS_URL
  valueFrom:
    secretKeyRef:
      name: {{ include "headrace.redisSecret" .root }}
      key: url
{{- end }}
{{- if and (has .group (list "head" "router")) $v.tenants.redis.existingSecret }}
- name: HEADRACE_TENANTS_REDIS_URL
  valueFrom:
    secretKeyRef:
      name: {{ $v.tenants.redis.existingSecret }}
      key: url
{{- if eq .group "router" }}
- name: HEADRACE_REDIS_URL
  valueFrom:
    secretKeyRef:
      name: {{ $v.tenants.redis.existingSecret }}
      key: url
{{- end }}
{{- end }}
{{- if $v.gcsFaultTolerance.enabled }}
- name: RAY_gcs_rpc_server_reconnect_timeout_s
  value: "86400"
{{- end }}
{{- with .spec.env }}
{{ toYaml . }}
{{- end }}
{{- end -}}

{{/* Which certificates a pod needs: commands on the head ask routers. Mounted whole, never by subPath: that would not renew. */}}
{{- define "headrace.tlsSides" -}}
{{- $v := .root.Values -}}
{{- $sides := list -}}
{{- if and $v.tls.public.existingSecret (has .group (list "head" "router")) -}}{{- $sides = append $sides "public" -}}{{- end -}}
{{- if and $v.tls.public.clientCaSecret (eq .group "router") -}}{{- $sides = append $sides "clients" -}}{{- end -}}
{{- if and $v.tls.internal.existingSecret (ne .group "head") -}}{{- $sides = append $sides "internal" -}}{{- end -}}
{{- toJson $sides -}}
{{- end -}}

{{- define "headrace.volumeMounts" -}}
{{- $v := .root.Values -}}
- name: config
  mountPath: /etc/headrace/cluster.yaml
  subPath: cluster.yaml
  readOnly: true
- name: secret
  mountPath: /etc/headrace/secret
  readOnly: true
{{- if and (eq .group "router") $v.tenants.existingSecret }}
- name: tenants
  mountPath: /etc/headrace/tenants
  readOnly: true
{{- end }}
{{- range $side := include "headrace.tlsSides" . | fromJsonArray }}
- name: tls-{{ $side }}
  mountPath: /etc/headrace/tls/{{ $side }}
  readOnly: true
{{- end }}
- name: home
  mountPath: /home/headrace
- name: tmp
  mountPath: /tmp
- name: shm
  mountPath: /dev/shm
{{- if and (ne .group "head") (include "headrace.modelMounted" .root) }}
- name: models
  mountPath: {{ $v.model.mountPath }}
  {{- if eq $v.model.source "pvc" }}
  {{- with $v.model.pvc.subPath }}
  subPath: {{ . }}
  {{- end }}
  readOnly: {{ $v.model.pvc.readOnly }}
  {{- end }}
{{- end }}
{{- if .spec.hugepages }}
- name: hugepages
  mountPath: /hugepages
{{- end }}
{{- with .spec.volumeMounts }}
{{ toYaml . }}
{{- end }}
{{- end -}}

{{- define "headrace.volumes" -}}
{{- $v := .root.Values -}}
- name: config
  configMap:
    name: {{ include "headrace.fullname" .root }}
- name: secret
  secret:
    secretName: {{ include "headrace.authSecret" .root }}
    defaultMode: 0440
    items:
      - key: cluster-secret
        path: cluster-secret
{{- if and (eq .group "router") $v.tenants.existingSecret }}
- name: tenants
  secret:
    secretName: {{ $v.tenants.existingSecret }}
    defaultMode: 0440
    items:
      - key: tenants.yaml
        path: tenants.yaml
{{- end }}
{{- range $side := include "headrace.tlsSides" . | fromJsonArray }}
- name: tls-{{ $side }}
  secret:
    {{- if eq $side "clients" }}
    secretName: {{ $v.tls.public.clientCaSecret }}
    items:
      - key: ca.crt
        path: ca.crt
    {{- else }}
    secretName: {{ (index $v.tls $side).existingSecret }}
    {{- end }}
    defaultMode: 0440
{{- end }}
- name: home
  emptyDir: {}
- name: tmp
  emptyDir: {}
- name: shm
  emptyDir:
    medium: Memory
    sizeLimit: {{ .spec.shm }}
{{- if and (ne .group "head") (include "headrace.modelMounted" .root) }}
- name: models
  {{- if eq $v.model.source "pvc" }}
  persistentVolumeClaim:
    claimName: {{ $v.model.pvc.claimName }}
    readOnly: {{ $v.model.pvc.readOnly }}
  {{- else }}
  emptyDir:
    sizeLimit: {{ $v.model.cacheSize }}
  {{- end }}
{{- end }}
{{- if .spec.hugepages }}
- name: hugepages
  emptyDir:
    medium: HugePages-2Mi
{{- end }}
{{- with .spec.volumes }}
{{ toYaml . }}
{{- end }}
{{- end -}}

{{/* Requests and limits, with the devices a pool asks for. */}}
{{- define "headrace.resources" -}}
{{- $v := .root.Values -}}
{{- $resources := deepCopy .spec.resources -}}
{{- $limits := $resources.limits | default dict -}}
{{- $requests := $resources.requests | default dict -}}
{{- with .spec.gpu -}}
{{- if gt (.count | int) 0 -}}{{- $_ := set $limits .resource (.count | toString) -}}{{- end -}}
{{- end -}}
{{- if and (has .group (list "prefill" "decode")) $v.transport.rdma.resource -}}
{{- $_ := set $limits $v.transport.rdma.resource ($v.transport.rdma.count | toString) -}}
{{- end -}}
{{- if .spec.hugepages -}}
{{- $_ := set $limits "hugepages-2Mi" .spec.hugepages -}}
{{- $_ := set $requests "hugepages-2Mi" .spec.hugepages -}}
{{- end -}}
{{- $_ := set $resources "limits" $limits -}}
{{- $_ := set $resources "requests" $requests -}}
{{- toYaml $resources -}}
{{- end -}}

{{- define "headrace.podSecurityContext" -}}
{{- $v := .root.Values -}}
{{- $range := printf "%d %d" (index $v.ports.internal 0 | int) (index $v.ports.internal 1 | int) -}}
{{- $own := mergeOverwrite (deepCopy $v.podSecurityContext) (deepCopy .spec.podSecurityContext) -}}
{{- $sysctls := append ($own.sysctls | default list) (dict "name" "net.ipv4.ip_local_port_range" "value" $range) -}}
{{- toYaml (set $own "sysctls" $sysctls) -}}
{{- end -}}

{{/* Capabilities are for workers, which register memory and read that of others; what fetches a model needs none. */}}
{{- define "headrace.securityContext" -}}
{{- $v := .root.Values -}}
{{- $own := mergeOverwrite (deepCopy $v.securityContext) (deepCopy .spec.securityContext) -}}
{{- $capabilities := $own.capabilities | default dict -}}
{{- $add := $capabilities.add | default list -}}
{{- if has .group (list "prefill" "decode") -}}
{{- if $v.transport.rdma.resource -}}{{- $add = append $add "IPC_LOCK" -}}{{- end -}}
{{- if $v.transport.ptrace -}}{{- $add = append $add "SYS_PTRACE" -}}{{- end -}}
{{- end -}}
{{- if $add -}}{{- $_ := set $own "capabilities" (set $capabilities "add" ($add | uniq)) -}}{{- end -}}
{{- toYaml $own -}}
{{- end -}}

{{/* Every 5 s. A pod fetches its model before Ray starts in it. */}}
{{- define "headrace.startupTries" -}}
{{- divf .Values.startupSeconds 5 | ceil -}}
{{- end -}}

{{/*
Startup, liveness and readiness. The supervisor starts a program again by itself and within seconds, so a pod is given up
only when Ray on it, or a router for minutes, does not answer. Ready is a pod whose program takes calls.
*/}}
{{- define "headrace.probes" -}}
{{- $v := .root.Values -}}
{{- $door := ternary "http" "admin" $v.router.sharePorts -}}
{{- $scheme := ternary ", scheme: HTTPS" "" (ne $v.tls.public.existingSecret "") -}}
{{- if eq .group "head" }}
startupProbe:
  tcpSocket: {port: gcs}
  periodSeconds: 2
  failureThreshold: 60
livenessProbe:
  tcpSocket: {port: gcs}
  periodSeconds: 10
  timeoutSeconds: 5
  failureThreshold: 6
readinessProbe:
  tcpSocket: {port: gcs}
  periodSeconds: 5
{{- else if eq .group "router" }}
startupProbe:
  httpGet: {path: /live, port: {{ $door }}{{ $scheme }}}
  periodSeconds: 5
  failureThreshold: {{ include "headrace.startupTries" .root }}
livenessProbe:
  httpGet: {path: /live, port: {{ $door }}{{ $scheme }}}
  periodSeconds: 10
  timeoutSeconds: 5
  failureThreshold: 30
readinessProbe:
  httpGet: {path: /ready, port: {{ $door }}{{ $scheme }}}
  periodSeconds: 2
  timeoutSeconds: 2
  failureThreshold: 2
{{- else }}
startupProbe:
  tcpSocket: {port: raylet}
  periodSeconds: 5
  failureThreshold: {{ include "headrace.startupTries" .root }}
livenessProbe:
  tcpSocket: {port: raylet}
  periodSeconds: 10
  timeoutSeconds: 5
  failureThreshold: 6
readinessProbe:
  exec:
    command: [sh, -c, 'test -n "$(ls {{ include "headrace.runDir" .root }}/ready)"']
  periodSeconds: 5
{{- end }}
{{- end -}}

{{- define "headrace.spread" -}}
{{- with .spec.topologySpread }}
{{- if .enabled }}
topologySpreadConstraints:
  - maxSkew: {{ .maxSkew }}
    topologyKey: {{ .topologyKey }}
    whenUnsatisfiable: {{ .whenUnsatisfiable }}
    labelSelector:
      matchLabels:
        {{- include "headrace.group" (dict "root" $.root "group" $.group) | nindent 8 }}
{{- end }}
{{- end }}
{{- end -}}

{{- define "headrace.nodeSelector" -}}
{{- $selector := deepCopy .spec.nodeSelector -}}
{{- with .spec.gpu -}}
{{- if and (gt (.count | int) 0) .product -}}{{- $_ := set $selector "nvidia.com/gpu.product" .product -}}{{- end -}}
{{- end -}}
{{- if $selector -}}{{- toYaml $selector -}}{{- end -}}
{{- end -}}

{{/* One pod template of the RayCluster. */}}
{{- define "headrace.podTemplate" -}}
{{- $v := .root.Values -}}
metadata:
  labels:
    {{- include "headrace.labels" .root | nindent 4 }}
    app.kubernetes.io/component: {{ .group }}
    {{- with .spec.labels }}
    {{- toYaml . | nindent 4 }}
    {{- end }}
  {{- with .spec.annotations }}
  annotations:
    {{- toYaml . | nindent 4 }}
  {{- end }}
spec:
  {{- if eq .group "head" }}
  serviceAccountName: {{ include "headrace.headServiceAccount" .root }}
  automountServiceAccountToken: {{ $v.autoscaling.enabled }}
  {{- else }}
  serviceAccountName: {{ include "headrace.workerServiceAccount" .root }}
  automountServiceAccountToken: false
  {{- end }}
  enableServiceLinks: false
  {{- if $v.autoscaling.enabled }}
  restartPolicy: Never
  {{- end }}
  terminationGracePeriodSeconds: {{ include "headrace.graceSeconds" .root }}
  securityContext:
    {{- include "headrace.podSecurityContext" . | nindent 4 }}
  {{- with $v.imagePullSecrets }}
  imagePullSecrets:
    {{- toYaml . | nindent 4 }}
  {{- end }}
  {{- with .spec.priorityClassName }}
  priorityClassName: {{ . }}
  {{- end }}
  {{- with .spec.runtimeClassName }}
  runtimeClassName: {{ . }}
  {{- end }}
  {{- with (include "headrace.nodeSelector" .) }}
  nodeSelector:
    {{- . | nindent 4 }}
  {{- end }}
  {{- with .spec.tolerations }}
  tolerations:
    {{- toYaml . | nindent 4 }}
  {{- end }}
  {{- with .spec.affinity }}
  affinity:
    {{- toYaml . | nindent 4 }}
  {{- end }}
  {{- with (include "headrace.spread" .) }}
  {{- . | trim | nindent 2 }}
  {{- end }}
  {{- if and (ne .group "head") $v.model.initContainer.image }}
  initContainers:
    - name: model
      {{- toYaml $v.model.initContainer | nindent 6 }}
      securityContext:
        {{- include "headrace.securityContext" (dict "root" .root "group" "model" "spec" .spec) | nindent 8 }}
      volumeMounts:
        - name: models
          mountPath: {{ $v.model.mountPath }}
        - name: tmp
          mountPath: /tmp
  {{- end }}
  containers:
    - name: headrace
      image: {{ include "headrace.image" .root }}
      imagePullPolicy: {{ $v.image.pullPolicy }}
      command:
        {{- include "headrace.command" . | nindent 8 }}
      env:
        {{- include "headrace.env" . | nindent 8 }}
      ports:
        {{- if eq .group "head" }}
        - {name: gcs, containerPort: {{ $v.ports.gcs }}}
        {{- else }}
        - {name: raylet, containerPort: {{ $v.ports.nodeManager }}}
        {{- end }}
        {{- if eq .group "router" }}
        - {name: http, containerPort: {{ $v.ports.http }}}
        - {name: grpc, containerPort: {{ $v.ports.grpc }}}
        {{- if not $v.router.sharePorts }}
        - {name: admin, containerPort: {{ $v.ports.admin }}}
        {{- end }}
        {{- end }}
      {{- include "headrace.probes" . | trim | nindent 6 }}
      {{- if ne .group "head" }}
      lifecycle:
        preStop:
          exec:
            command: [headrace, leave, --name, {{ include "headrace.fullname" .root }}, --after, {{ ternary "5" "0" (eq .group "router") | quote }}]
      {{- end }}
      resources:
        {{- include "headrace.resources" . | nindent 8 }}
      securityContext:
        {{- include "headrace.securityContext" . | nindent 8 }}
      volumeMounts:
        {{- include "headrace.volumeMounts" . | nindent 8 }}
  volumes:
    {{- include "headrace.volumes" . | nindent 4 }}
{{- end -}}
