package penstock.kafka

import java.io.IOException
import java.net.URI
import java.nio.charset.StandardCharsets.UTF_8
import java.time.Duration
import java.util.Base64
import software.amazon.awssdk.auth.credentials.DefaultCredentialsProvider
import software.amazon.awssdk.core.exception.SdkException
import software.amazon.awssdk.http.auth.aws.signer.{AwsV4FamilyHttpSigner, AwsV4HttpSigner}
import software.amazon.awssdk.http.auth.spi.signer.SignRequest
import software.amazon.awssdk.http.{SdkHttpMethod, SdkHttpRequest}
import software.amazon.awssdk.identity.spi.AwsCredentialsIdentity
import software.amazon.awssdk.profiles.ProfileFileSupplier

/** Tokens for AWS MSK with IAM, as `services.core.security.msk_token` makes them, from the credentials that AWS's SDK finds on this host. */
private object MskToken {
  private val Lifetime = Duration.ofMinutes(15)
  private val Signer = AwsV4HttpSigner.create()
  private lazy val credentials =
    DefaultCredentialsProvider.builder().profileFile(ProfileFileSupplier.defaultSupplier()).build()

  /** The token, and when it ends. */
  def make(region: String): (String, Long) = {
    val found =
      try credentials.resolveCredentials()
      catch {
        case _: SdkException =>
          throw new IOException("there are no AWS credentials. Try: a role for this host, as in docs/kafka.md")
      }
    val url = URI.create(s"https://kafka.$region.amazonaws.com/?Action=kafka-cluster%3AConnect")
    val request = SdkHttpRequest.builder().uri(url).method(SdkHttpMethod.GET).build()
    val wanted = SignRequest.builder[AwsCredentialsIdentity](found).request(request)
    wanted.putProperty(AwsV4FamilyHttpSigner.SERVICE_SIGNING_NAME, "kafka-cluster")
    wanted.putProperty(AwsV4HttpSigner.REGION_NAME, region)
    wanted.putProperty(AwsV4FamilyHttpSigner.AUTH_LOCATION, AwsV4FamilyHttpSigner.AuthLocation.QUERY_STRING)
    wanted.putProperty(AwsV4FamilyHttpSigner.EXPIRATION_DURATION, Lifetime)
    val signed = Signer.sign(wanted.build()).request().getUri
    val text = s"$signed&User-Agent=penstock".getBytes(UTF_8)
    Base64.getUrlEncoder.withoutPadding.encodeToString(text) -> (System.currentTimeMillis + Lifetime.toMillis)
  }
}
