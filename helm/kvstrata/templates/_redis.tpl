{{/* The state store as the masters' flags name it. */}}

{{/* The Secret with the TLS files of the masters' way to Redis; empty without one. */}}
{{- define "kvstrata.redisTlsSecret" -}}
{{- if .Values.redis.tls.certManager.enabled -}}
{{- include "kvstrata.fullname" . }}-redis-client
{{- else -}}
{{- .Values.redis.tls.secretName -}}
{{- end -}}
{{- end -}}

{{/* The URL, with the files that are mounted for it. */}}
{{- define "kvstrata.redisUrl" -}}
{{- $options := list -}}
{{- if include "kvstrata.redisTlsSecret" . -}}
{{- $dir := "/etc/kvstrata/redis-tls" -}}
{{- $options = list (printf "ca=%s/ca.crt" $dir) (printf "cert=%s/tls.crt" $dir) (printf "key=%s/tls.key" $dir) -}}
{{- end -}}
{{- if .Values.redis.sentinelPasswordSecret.name -}}
{{- $options = append $options "sentinel_password_file=/etc/kvstrata/sentinel/password" -}}
{{- end -}}
{{- $url := .Values.redis.url -}}
{{- if $options -}}
{{- printf "%s%s%s" $url (contains "?" $url | ternary "&" "?") (join "&" $options) -}}
{{- else -}}
{{- $url -}}
{{- end -}}
{{- end -}}
