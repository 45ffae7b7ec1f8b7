{{- define "normserve.selector" -}}
app.kubernetes.io/name: normserve
app.kubernetes.io/instance: {{ .Release.Name }}
{{- end }}

{{- define "normserve.labels" -}}
{{ include "normserve.selector" . }}
app.kubernetes.io/managed-by: {{ .Release.Service }}
helm.sh/chart: {{ .Chart.Name }}-{{ .Chart.Version }}
{{- end }}

{{- define "normserve.image" -}}
{{ .Values.image.repository }}:{{ .Values.image.tag | default .Values.device }}
{{- end }}

{{/* The settings of the device, and over them those of the values. */}}
{{- define "normserve.settings" -}}
{{- $settings := dict "NORMSERVE_LOG_LEVEL" "info" "NORMSERVE_GRPC_PORT" "8001" "NORMSERVE_DRAIN_DELAY_S" "5" }}
{{- if eq .Values.device "cpu" }}
{{- $_ := set $settings "NORMSERVE_CPU_THREADS" "3" }}
{{- $_ := set $settings "NORMSERVE_MAX_INFLIGHT_BYTES" "1073741824" }}
{{- $_ := set $settings "NORMSERVE_MAX_BODY_BYTES" "268435456" }}
{{- $_ := set $settings "NORMSERVE_MAX_IDLE_SLAB_BYTES" "536870912" }}
{{- end }}
{{- range $name, $value := .Values.settings }}
{{- /* Numbers of YAML are floats, which would be printed with an exponent. */}}
{{- if kindIs "float64" $value }}{{ $value = $value | toJson }}{{ end }}
{{- $_ := set $settings $name (toString $value) }}
{{- end }}
{{- /* Probes have no certificate of a client, and use the socket. */}}
{{- if and (get $settings "NORMSERVE_TLS_CLIENT_CA") (not (get $settings "NORMSERVE_UDS")) }}
{{- $_ := set $settings "NORMSERVE_UDS" "/tmp/normserve.sock" }}
{{- end }}
{{- toYaml $settings }}
{{- end }}

{{/* A setting by its name in the list (. NAME); nothing if it is not set. */}}
{{- define "normserve.setting" -}}
{{- get (include "normserve.settings" (first .) | fromYaml) (last .) }}
{{- end }}

{{/* Variables that only the cluster knows; nothing if there are none. */}}
{{- define "normserve.environment" -}}
{{- /* The server refuses to start with both. */}}
{{- if and .Values.apiKeySecret (not (include "normserve.setting" (list . "NORMSERVE_API_KEYS_FILE"))) }}
- name: NORMSERVE_API_KEY
  valueFrom:
    secretKeyRef:
      name: {{ .Values.apiKeySecret }}
      key: api-key
{{- end }}
{{- $hosts := include "normserve.setting" (list . "NORMSERVE_ALLOWED_HOSTS") | trim }}
{{- if not (has $hosts (list "" "*")) }}
# Prometheus scrapes a pod by its address.
- name: POD_IP
  valueFrom:
    fieldRef:
      fieldPath: status.podIP
- name: NORMSERVE_ALLOWED_HOSTS
  value: {{ printf "%s,$(POD_IP)" $hosts | quote }}
{{- end }}
{{- end }}

{{/* How a probe asks for a path, as the list (. PATH). */}}
{{- define "normserve.probe" -}}
{{- if include "normserve.setting" (list (first .) "NORMSERVE_TLS_CLIENT_CA") -}}
exec:
  command:
    - python
    - /usr/local/lib/normserve/healthcheck.py
    - {{ last . }}
{{- else -}}
httpGet:
  path: {{ last . }}
  port: http
  {{- if include "normserve.setting" (list (first .) "NORMSERVE_TLS_CERT") }}
  scheme: HTTPS
  {{- end }}
{{- end }}
{{- end }}

{{/* Half of the admitted bytes, beyond which the autoscaler adds pods. */}}
{{- define "normserve.targetBytes" -}}
{{- $settings := include "normserve.settings" . | fromYaml }}
{{- $bytes := get $settings "NORMSERVE_MAX_INFLIGHT_BYTES" | default "4294967296" }}
{{- if not (regexMatch "^[0-9]+$" $bytes) }}
{{- fail (printf "settings.NORMSERVE_MAX_INFLIGHT_BYTES must be a number of bytes, got %s" $bytes) }}
{{- end }}
{{- div (int64 $bytes) 2 }}
{{- end }}

{{/* Longer than the delay before the drain, the drain and the end of connections and device together. */}}
{{- define "normserve.gracePeriod" -}}
{{- $settings := include "normserve.settings" . | fromYaml }}
{{- $drain := get $settings "NORMSERVE_DRAIN_S" | default "30" | float64 }}
{{- add 15 (ceil (addf $drain (get $settings "NORMSERVE_DRAIN_DELAY_S" | float64))) }}
{{- end }}

{{- define "normserve.containerSecurity" -}}
allowPrivilegeEscalation: false
readOnlyRootFilesystem: true
capabilities:
  drop:
    - ALL
{{- end }}
