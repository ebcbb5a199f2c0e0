{{- define "batchery.name" -}}
{{- if contains "batchery" .Release.Name }}{{ .Release.Name }}{{ else }}{{ .Release.Name }}-batchery{{ end }}
{{- end }}

{{/* Labels by which a component is found; they never change. Takes [root, component]. */}}
{{- define "batchery.selector" -}}
app.kubernetes.io/name: batchery
app.kubernetes.io/instance: {{ (index . 0).Release.Name }}
app.kubernetes.io/component: {{ index . 1 }}
{{- end }}

{{- define "batchery.labels" -}}
{{ include "batchery.selector" . }}
app.kubernetes.io/version: {{ (index . 0).Chart.AppVersion | quote }}
app.kubernetes.io/managed-by: {{ (index . 0).Release.Service }}
{{- end }}

{{- define "batchery.image" -}}
{{ .Values.image.repository }}:{{ .Values.image.tag | default .Chart.AppVersion }}
{{- end }}

{{- define "batchery.redisSecret" -}}
{{ .Values.redis.existingSecret | default (printf "%s-redis" (include "batchery.name" .)) }}
{{- end }}

{{- define "batchery.gatewaySecret" -}}
{{ .Values.gateway.existingSecret | default (printf "%s-gateway" (include "batchery.name" .)) }}
{{- end }}

{{/* An entry of `workers`, with what it leaves out. Takes [root, entry]. */}}
{{- define "batchery.worker" -}}
{{- mergeOverwrite (deepCopy (index . 0).Values.workerDefaults) (index . 1 | default dict) | toYaml }}
{{- end }}

{{/* The pod of each component: no rights, no token. Takes [root, values of the component]. */}}
{{- define "batchery.pod" -}}
serviceAccountName: {{ include "batchery.name" (index . 0) }}
automountServiceAccountToken: false
enableServiceLinks: false
{{- with (index . 0).Values.image.pullSecrets }}
imagePullSecrets: {{ toYaml . | nindent 2 }}
{{- end }}
securityContext:
  runAsNonRoot: true
  runAsUser: 10001
  runAsGroup: 10001
  fsGroup: 10001
  # A large model cache is not walked through at each start.
  fsGroupChangePolicy: OnRootMismatch
  seccompProfile: {type: RuntimeDefault}
{{- with (index . 1).pod }}
{{ toYaml . }}
{{- end }}
{{- end }}

{{- define "batchery.container" -}}
imagePullPolicy: {{ .Values.image.pullPolicy }}
securityContext:
  allowPrivilegeEscalation: false
  readOnlyRootFilesystem: true
  capabilities: {drop: [ALL]}
{{- end }}

{{/* Environment of workers, gateway and exporter. Takes [root, values of the component]. */}}
{{- define "batchery.env" -}}
{{- range $name := list "BATCHERY_REDIS_URL" "CELERY_BROKER_URL" "CELERY_RESULT_BACKEND" }}
- name: {{ $name }}
  valueFrom: {secretKeyRef: {name: {{ include "batchery.redisSecret" (index $ 0) }}, key: url}}
{{- end }}
{{- with (index . 0).Values.hubTokenSecret }}
- name: HF_TOKEN
  valueFrom: {secretKeyRef: {name: {{ .name }}, key: {{ .key }}}}
{{- end }}
{{- with (index . 0).Values.env }}
{{ toYaml . }}
{{- end }}
{{- with (index . 1).env }}
{{ toYaml . }}
{{- end }}
{{- end }}

{{/* What a container may write to, but for files of the gateway; and the settings. */}}
{{- define "batchery.mounts" -}}
- {name: settings, mountPath: /app/batchery.toml, subPath: batchery.toml, readOnly: true}
- {name: models, mountPath: /var/cache/huggingface}
- {name: tmp, mountPath: /tmp}
{{- end }}

{{- define "batchery.volumes" -}}
{{- $name := include "batchery.name" . -}}
- name: settings
  configMap: {name: {{ $name }}}
- name: tmp
  emptyDir: {}
- name: models
  {{- with .Values.modelCache }}
  {{- if or .enabled .existingClaim }}
  persistentVolumeClaim: {claimName: {{ .existingClaim | default (printf "%s-models" $name) }}}
  {{- else }}
  emptyDir: {sizeLimit: {{ .ephemeralSize }}}
  {{- end }}
  {{- end }}
{{- end }}

{{/* Settings are read at the start: pods are replaced when they change. Takes [root, port of metrics]. */}}
{{- define "batchery.annotations" -}}
checksum/settings: {{ include (print (index . 0).Template.BasePath "/settings.yaml") (index . 0) | sha256sum }}
{{- with index . 1 }}
# Prometheus' own chart scrapes what has these.
prometheus.io/scrape: "true"
prometheus.io/port: {{ . | quote }}
{{- end }}
{{- end }}
